"""Write the first layers of a model as a model of its own: smaller reward models from the same checkpoint."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Keep the first layers, the embedding, the last norm and the head."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--depth", type=int, required=True)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    model.model.layers = model.model.layers[: given.depth]
    model.config.num_hidden_layers = given.depth
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: given.depth]
    model.save_pretrained(given.output)
    AutoTokenizer.from_pretrained(given.model).save_pretrained(given.output)


if __name__ == "__main__":
    main()
