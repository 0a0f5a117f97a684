"""The training loops read as their algorithms: short, flat, and in the order of the algorithm's steps."""

import ast

import pytest
from support.source_tree import ROOT, STAGES, functions, tree_of

MAX_TRAIN_LINES = 60
MAX_LOOP_LINES = 40
ALGORITHM = {
    "step1_sft": ["accumulate_gradients", "step_together"],
    "step2_reward": ["accumulate_gradients", "step_together"],
    "step3_dpo": ["accumulate_gradients", "step_together"],
    "step3_ppo": ["sample", "score", "score_rewards", "reward", "step_objectives", "adapt_kl"],
}

WITHOUT_CLOSURES = ("sample", "score", "score_rewards", "reward", "step_objectives", "evaluate", "evaluate_held_out")


def train_of(stage: str) -> ast.FunctionDef:
    tree = tree_of(ROOT / stage / "training.py")
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")


def loop_of(stage: str) -> ast.While:
    (loop,) = [node for node in ast.walk(train_of(stage)) if isinstance(node, ast.While | ast.For)]
    assert isinstance(loop, ast.While)
    return loop


def called_in(node: ast.AST) -> list[str]:
    """Names of functions called at `node` or below, in the order of the text."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    return [call.func.id for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]


@pytest.mark.parametrize("stage", STAGES)
def test_train_is_short_and_flat(stage):
    train, loop = train_of(stage), loop_of(stage)
    assert train.end_lineno - train.lineno + 1 <= MAX_TRAIN_LINES
    assert loop.end_lineno - loop.lineno + 1 <= MAX_LOOP_LINES
    assert list(functions(train)) == [train], "no function is defined inside"
    forbidden = (ast.Yield, ast.YieldFrom, ast.Nonlocal, ast.Continue, ast.Return)
    assert not any(isinstance(node, forbidden) for node in ast.walk(train))
    ways_out = [node for node in ast.walk(train) if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Break)]
    assert ast.unparse(loop.test) == "True" and [ast.unparse(node.test) for node in ways_out] == ["is_done"]
    assert sum(isinstance(node, ast.Break) for node in ast.walk(train)) == 1, "one way out, or a stop"


@pytest.mark.parametrize("stage", STAGES)
def test_the_body_of_the_loop_is_one_context_that_halves_batches(stage):
    """No step of the algorithm has its own: what runs out of memory ends the turn, which begins again."""
    (context,) = loop_of(stage).body
    assert isinstance(context, ast.With)
    assert ast.unparse(context.items[0].context_expr) == "control.halving.when_out_of_memory(state)"
    tree = tree_of(ROOT / stage / "training.py")
    steps = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in WITHOUT_CLOSURES]
    assert steps and all(list(functions(step)) == [step] for step in steps)


@pytest.mark.parametrize("stage", STAGES)
def test_the_loop_names_the_steps_of_its_algorithm_in_order(stage):
    steps = [name for name in called_in(loop_of(stage)) if name in ALGORITHM[stage]]
    assert steps == ALGORITHM[stage]


def test_four_files_lead_from_train_to_the_clipped_loss():
    """train calls step_objectives in its file, that Updater.update, that each objective's loss, that policy_loss."""

    def calls(file: str, function: str, name: str) -> bool:
        (node,) = [node for node in functions(tree_of(ROOT / "step3_ppo" / file)) if node.name == function]
        return any(ast.unparse(call.func).endswith(name) for call in ast.walk(node) if isinstance(call, ast.Call))

    assert calls("training.py", "train", "step_objectives")
    assert calls("training.py", "step_objectives", "updater.update")
    assert calls("updater.py", "update", "objective.loss")
    (policy,) = [node for node in tree_of(ROOT / "step3_ppo/objectives.py").body
                 if isinstance(node, ast.ClassDef) and node.name == "PolicyObjective"]  # fmt: skip
    (loss,) = [node for node in functions(policy) if node.name == "loss"]
    assert "policy_loss" in called_in(loss)
    assert "policy_loss" in {node.name for node in functions(tree_of(ROOT / "step3_ppo" / "mathematics" / "losses.py"))}


def test_the_control_of_a_run_holds_no_loop_and_knows_no_model():
    tree = tree_of(ROOT / "pipeline/training/run_control.py")
    loops = (ast.For, ast.While, ast.comprehension)
    assert not any(isinstance(node, loops) for node in ast.walk(tree))
    assert not any(isinstance(node, ast.Attribute) and node.attr in ("module", "backward") for node in ast.walk(tree))
