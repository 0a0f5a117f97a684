"""Reading and tokenising data: files and hub ids become the tensors of an optimizer step."""
