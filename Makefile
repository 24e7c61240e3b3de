# Every target also works without make: each is the command that it runs.
RUN = python3 environments/run.py
ENGINE = 0.32.0
PYTEST = pytest -n 2 --dist loadfile
COMPAT_TESTS = tests/unit tests/engine

.PHONY: demo test test-compat test-ascend test-ascend-graph lint bench bench-ascend package

demo:  ## A real answer from a real server, from nothing
	$(RUN) $(ENGINE) vllm-ascend-models demo

test: lint  ## The whole suite on the newest engine
	$(RUN) $(ENGINE) $(PYTEST) tests

test-compat:  ## What touches the engine, on the two older ones
	$(RUN) 0.23.0 $(PYTEST) $(COMPAT_TESTS)
	$(RUN) 0.18.0 $(PYTEST) $(COMPAT_TESTS)

test-ascend:  ## The real vllm-ascend on an emulated NPU, one engine at a time
	$(RUN) ascend pytest tests/ascend

test-ascend-graph:  ## Of these, compiled and in ACL graphs of every mode
	$(RUN) ascend pytest tests/ascend/test_graphs.py

lint:
	$(RUN) $(ENGINE) ruff check
	$(RUN) $(ENGINE) ruff format --check
	$(RUN) $(ENGINE) mypy

bench:  ## Each prints ratios within one run
	$(RUN) $(ENGINE) python benchmarks/plugin_cost.py
	$(RUN) $(ENGINE) python benchmarks/startup.py
	$(RUN) $(ENGINE) python benchmarks/openelm_vs_llama.py --eager --dtype float32

bench-ascend:  ## Kernels a layer launches, counted on the emulated NPU
	$(RUN) ascend python benchmarks/launches.py

package:  ## Wheel and sdist, checked as for an upload
	$(RUN) $(ENGINE) python -m build
	$(RUN) $(ENGINE) twine check --strict dist/*
