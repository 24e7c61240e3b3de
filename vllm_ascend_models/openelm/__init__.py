"""OpenELM (arXiv 2404.14619): configuration, model, tokenizer and chat format."""
