"""Single responses: what a label says of them, and responses that are lists of one message."""

from support.row_options import read

from pipeline.data.formats import Record
from pipeline.data.turns import Message


def one(values: dict, **options) -> Record:
    (record,), _ = read(values, **options)
    return record


def test_a_response_is_good_only_where_a_label_does_not_say_false():
    """The KTO layout; a CSV file spells a truth value as text, and a class number is no truth value."""
    row = {"prompt": "q", "completion": "a"}
    labels = {True: ("a", None, True), False: (None, "a", False), "False": (None, "a", False), 2: ("a", None, "2")}
    for label, (chosen, rejected, read_as) in {**labels, None: ("a", None, None)}.items():
        record = one({**row, "label": label})
        assert (record.chosen, record.rejected, record.messages) == (chosen, rejected, (Message("user", "q"),))
        assert record.label is read_as or record.label == read_as != 1
    pair = one({"prompt": "q", "chosen": "a", "rejected": "b", "label": False})
    assert pair.chosen == "a" and pair.label is None
    assert one({**row, "liked": False}, column_map={"label": "liked"}).label is False


def test_a_response_may_be_a_list_of_one_message():
    row, turn = {"prompt": "q", "response": "a"}, {"role": "assistant", "content": " a"}
    for response in ([turn], turn):
        assert one({"prompt": [{"role": "user", "content": "q"}], "completion": response}).chosen == "a"
    _, counts = read(row, {"prompt": "q", "completion": [{"role": "user", "content": "q"}, turn]})
    assert counts["completion is no single assistant turn"] == 1
