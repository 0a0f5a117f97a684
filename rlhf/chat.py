"""Chat with a model: `rlhf chat output/actor`. For one question from a pipe, stdout has only the reply."""

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype, Group
from pipeline.errors import InputError, RunError, counted, nearest, printable, say, takes_escapes
from pipeline.files import append_row, refused_by_disk
from pipeline.inference.answer_settings import ReplySettings
from pipeline.models.paths import check_language_model, check_reward_model
from pipeline.rewards.tool_flags import ToolConfig
from pipeline.rewards.worker_flags import WorkerFlags
from pipeline.run.entry import command, command_flags

if TYPE_CHECKING:
    from pipeline.inference.answer_scores import AnswerScorer
    from pipeline.inference.chat_session import Conversation, Reply

MAX_SEED = 2**31
COMMANDS = {
    "/help": "this list",
    "/clear": "start a new conversation",
    "/retry": "another reply to the last question",
    "/score": "score of the last reply, by the model of --reward-model",
    "/save": "FILE.jsonl: append the conversation as a row, which step 1 can train on",
    "/system": "TEXT: start a new conversation with this system prompt; without TEXT: with none",
    "/set": f"NAME VALUE: change {', '.join(ReplySettings.model_fields)}",
    "/exit": "leave, like Ctrl-D, exit and quit",
}
KEYS = "Alt-Enter, or a \\ at the end of a line, starts a new line. Tab completes commands, Up recalls messages."


class ChatConfig(Group):
    """Chat with a model: `rlhf chat output/actor`."""

    model: str = flag(
        "",
        "Folder (a merged model or a LoRA adapter) or hub id",
        kind="path",
        aliases=("path", "model_name_or_path"),
        positional=True,
        required=True,
    )
    system: str = flag("", "System prompt; if not given: the template's own, if it has one", kind="text")
    prompt: str = flag("", "Answer this one question and exit, as for a question from a pipe", kind="text")
    reward_model: str = flag(
        "",
        "Folder of a reward model that scores each reply; none: no scores",
        kind="path",
        aliases=("reward_model_name_or_path",),
    )
    seed: int = flag(-1, "Seed of sampled replies; -1: a random one", ge=-1, lt=MAX_SEED)
    dtype: Dtype = flag("auto", "Data type of the weights; auto: bf16 if the device supports it, else fp32")
    tools: ToolConfig = ToolConfig()
    workers: WorkerFlags = WorkerFlags()
    sampling: ReplySettings = ReplySettings(temperature=0.7, top_p=0.95, max_new_tokens=512)


def run(argv: list[str], prog: str) -> None:
    """Check the command line, then reply to one question or start a session."""
    config = command_flags(ChatConfig, argv, section="chat", prog=prog, not_empty=("prompt",)).config
    if not config.model:
        raise InputError(f"--model: missing; name a model's folder, for example: {prog} output/actor")
    check_language_model(config.model, "--model")
    if config.reward_model:
        check_reward_model(config.reward_model, "--reward-model")
    question = single_question(config)
    from pipeline.inference.answer_scores import load_scorer
    from pipeline.inference.answers import load_chat_model, resolve_dtype
    from pipeline.inference.chat_session import Conversation
    from pipeline.inference.tool_conversations import open_tools

    seed = secrets.randbelow(MAX_SEED) if config.seed < 0 else config.seed
    dtype = resolve_dtype(config.dtype)
    chat_model = load_chat_model(config.model, dtype=dtype)
    scorer = load_scorer(config.reward_model, dtype=dtype) if config.reward_model else None
    with open_tools(config.tools, config.workers, chat_model.tokenizer) as tools:
        conversation = Conversation(chat_model, config.sampling, system=config.system, seed=seed, tools=tools)
        if question is None:
            Shell(conversation, scorer).run()
            return
        reply = conversation.say(question, show)
    print()
    if reply.ending == "stopped":
        raise KeyboardInterrupt
    if reply.reward is not None:
        say(f"reward {reply.reward:.4g} by the environment")
    if scorer and reply.text:
        say(f"score {conversation.score(scorer):.4g}")


def single_question(config: ChatConfig) -> str | None:
    """Return the question of --prompt or of a pipe; None in a terminal."""
    if config.prompt:
        return config.prompt
    if sys.stdin.isatty():
        return None
    question = sys.stdin.read()
    if not question.strip():
        raise InputError("the pipe is empty: give it one question, or start this in a terminal")
    return question


def show(piece: str) -> None:
    """Print a piece of a reply at once, without control characters."""
    sys.stdout.write(printable(piece))
    sys.stdout.flush()


class Shell:
    """A terminal session of questions and /commands. Replies go to stdout, notes to stderr."""

    def __init__(self, conversation: "Conversation", scorer: "AnswerScorer | None" = None) -> None:
        self.conversation = conversation
        self.scorer = scorer
        self.console = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Reply until the user leaves."""
        read_message = terminal_reader()
        self.note(banner(self.conversation))
        while True:
            try:
                self.execute(read_message())
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                self.note("\nCtrl-D or /exit leaves")
            except RunError as error:
                self.note(f"error: {error}", style="red")

    def note(self, text: str, *, style: str = "dim") -> None:
        self.console.print(Text(printable(text), style=style))

    def execute(self, line: str) -> None:
        """Execute one line: a question or a /command. Raises EOFError to leave."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if not line.startswith("/"):
            if line.strip() in ("exit", "quit"):
                raise EOFError
            if word:
                self.reply_to(line)
            return
        match word:
            case "/help":
                lines = [f"{name:8} {text}" for name, text in COMMANDS.items()]
                self.note("\n".join([*lines, KEYS]))
            case "/clear":
                self.conversation.start_afresh()
                self.note("a new conversation")
            case "/score" if not self.scorer:
                raise InputError("/score: no reward model is loaded; start again with --reward-model FOLDER")
            case "/retry" | "/score" | "/save" if not self.conversation.turns:
                raise InputError(f"{word}: there is no reply yet")
            case "/retry":
                self.reply_to(self.conversation.take_back())
            case "/score" if self.scorer:
                deviation = self.scorer.deviation
                scale = f"; stage 2 measured a standard deviation of {deviation:.3g}" if deviation else ""
                self.note(f"score {self.conversation.score(self.scorer):.4g} by {self.scorer.path}{scale}")
            case "/save":
                self.save(rest)
            case "/system":
                self.conversation.start_afresh(rest)
                self.note(f"a new conversation{' with this system prompt' if rest else ', no system prompt'}")
            case "/set":
                self.set(rest)
            case "/exit":
                raise EOFError
            case _:
                hint = nearest(word, COMMANDS) or "; /help lists them."
                raise InputError(f"{word}: unknown command{hint} A space in front of / sends it as text.")

    def reply_to(self, question: str) -> None:
        reply = self.conversation.say(question, show)
        print()
        score = self.conversation.score(self.scorer) if self.scorer and reply.text else None
        self.note(summary(reply, self.conversation.chat_model.num_positions, score))

    def save(self, name: str) -> None:
        """Append the conversation to a .jsonl file, as a row of messages."""
        try:
            path = Path(name).expanduser()
        except RuntimeError as error:
            raise InputError(f"/save: {name}: {error}") from None
        if "\0" in name or path.suffix != ".jsonl" or (path.exists() and not path.is_file()):
            raise InputError(f"/save: got {name!r}, expected a file that ends in .jsonl, new or with rows to append to")
        with refused_by_disk(path):
            append_row(path, {"messages": self.conversation.messages})
        self.note(f"{counted(len(self.conversation.messages), 'message')} appended to {path} as one row")

    def set(self, assignment: str) -> None:
        """Change a setting of later replies: `/set NAME VALUE`."""
        name, _, value = assignment.replace("=", " ").partition(" ")
        settings = self.conversation.settings.model_dump()
        if name not in settings:
            hint = nearest(name, settings) or f"; these can be set: {', '.join(settings)}"
            raise InputError(f"/set {name}: unknown setting{hint}")
        try:
            text = value.strip()
            new = [text] * bool(text) if isinstance(settings[name], list) else text
            self.conversation.settings = ReplySettings.model_validate({**settings, name: new})
        except ValidationError as error:
            raise InputError(f"/set {name}: got {value.strip()!r}: {error.errors()[0]['msg']}") from None
        self.note(settings_line(self.conversation.settings))


def terminal_reader() -> Callable[[], str]:
    """Return a function that reads a message, with editing and a history if the terminal takes escape sequences."""
    if not takes_escapes(sys.stdout):
        return read_plainly
    from pipeline.inference.message_prompt import message_reader

    return message_reader([*COMMANDS, *(f"/set {name} " for name in ReplySettings.model_fields)])


def read_plainly() -> str:
    """Read a message from a terminal without escape sequences; a line that ends in a backslash continues."""
    line = input("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(". ")
    return line


def settings_line(settings: ReplySettings) -> str:
    values = {name: value for name, value in settings.model_dump().items() if value != []}
    how = ", ".join(f"{name} {value if isinstance(value, list) else f'{value:g}'}" for name, value in values.items())
    return how if settings.temperature else f"{how} (greedy)"


def banner(conversation: "Conversation") -> str:
    """Return the first lines of a session: model, settings, and how to get help."""
    model = conversation.chat_model.model
    count = sum(parameter.numel() for parameter in model.parameters())
    kind = f"{type(model).__name__}, {count / 1e6:,.1f} M parameters, {str(model.dtype).removeprefix('torch.')}"
    schemas = conversation.tools.tools.schemas if conversation.tools else []
    names = f"tools: {', '.join(one['function']['name'] for one in schemas)}\n" if schemas else ""
    return (
        f"{conversation.chat_model.path}: {kind} on {model.device}\n"
        f"{settings_line(conversation.settings)}, seed {conversation.seed}\n{names}"
        "/help lists the commands. Ctrl-C stops a reply, Ctrl-D leaves."
    )


def summary(reply: "Reply", num_positions: int | None, score: float | None) -> str:
    """Return a line about a reply: tokens, seconds, score, and why it ended early, if it did."""
    parts = [f"{reply.num_tokens} tokens, {reply.time_s:.1f} s"]
    if reply.reward is not None:
        parts.append(f"reward {reply.reward:.4g} by the environment")
    if score is not None:
        parts.append(f"score {score:.4g}")
    if not reply.text:
        parts.append("an empty reply; the question is dropped")
    elif reply.ending == "stopped":
        parts.append("stopped; the conversation keeps this part")
    elif reply.ending == "limit":
        parts.append("cut off at the token limit")
    if reply.num_forgotten:
        reason = f"no longer fit into {num_positions} positions" if num_positions else "are more than this model reads"
        parts.append(f"the oldest {reply.num_forgotten} turns {reason}: left out")
    return "; ".join(parts)


main = command(run, "rlhf chat")
