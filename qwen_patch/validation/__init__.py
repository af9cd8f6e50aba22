"""What `validate_qwen` measures, and how it judges: the answers of a patched model against the stock model's."""
