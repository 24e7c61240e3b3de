"""The command `vllm-ascend-models`: one file per subcommand, listed in `main`."""
