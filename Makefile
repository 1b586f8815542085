# Every target sets up what it needs in .venv on a fresh machine; nothing else is touched.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

# Of what pip installs few files are ever imported: Python compiles those when they are.
export PIP_COMPILE := no
# So what was compiled must be kept, though images of containers say otherwise: tests start processes by dozens.
unexport PYTHONDONTWRITEBYTECODE
# What was compiled once is not compiled again, for the wheel or behind a change of one source.
export CCACHE_DIR := $(CURDIR)/build/ccache

.PHONY: demo test package cpp kernels docs lint fuzz fuzz-triton36 sanitize test-gpu-code test-triton36 test-cuda test-torchao test-vllm bench vllm llama-cpp clean

## Decode a real file with the embedded target, plainly and speculatively. FILE= continues your own.
demo: $(VENV)/.demo
	$(BIN)/specattn demo $(if $(FILE),"$(FILE)")
	@echo "The command is $(BIN)/specattn: try $(BIN)/specattn generate --prompt-file examples/engine.py, or -h"

## The tests that need no GPU. Of GPU code few cases, and all where it differs from what tools/ptx/executed.json records.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

## Wheel and sdist into dist/, then both into fresh virtual environments, in which no compiler is found.
package: $(VENV)/.dev
	rm -rf dist build/package && mkdir -p build/package
	$(BIN)/python -m build --no-isolation --outdir dist . > build/package/build.log || (tail -40 build/package/build.log; false)
	$(PYTHON) tests/package.py dist "$(TORCH)" build/package

## The documentation as a site in build/site, notebooks run; a broken link or an undocumented name fails.
## Then it is opened in Chromium, where there is one.
docs: $(VENV)/docs/.done
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --quiet --strict
	$(BIN)/python -m pytest -p no:cacheprovider tests/site $(ARGS)

## Style, types, docstrings with their examples, and the direction of imports.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/cpu/*.cpp csrc/cpu/*.h csrc/cpu/*/*.cpp csrc/cpu/*/*.h examples/cpp/*.cpp csrc/cuda/*.cu csrc/cuda/*.cuh
	$(BIN)/mypy
	$(BIN)/python -m pytest -p no:cacheprovider tests/test_docstrings.py
	@# The import graph is read from files, so the mapping of setup.py is laid out as folders first.
	@rm -rf build/layers && mkdir -p build/layers
	@cp -r python/specattn build/layers && cp -r reference triton_kernels build/layers/specattn
	cd build/layers && ../../$(BIN)/lint-imports --config ../../pyproject.toml

## Builds for Hugging Face's `kernels` into build/kernels; then it loads them all, beside torch alone.
kernels: $(VENV)/.dev
	rm -rf build/kernels && $(BIN)/python tools/kernels_build.py build/kernels
	$(PYTHON) tests/kernels_build.py build/kernels "$(TORCH)" kernels==0.17.2 build

## The CPU kernels as a library for C and C++, installed into build/cpp, and an example that uses it; no Python in it.
## BUILD=Debug compiles it in an eighth of the time, for slow kernels.
cpp: $(VENV)/.dev
	$(BIN)/cmake -S csrc/cpu -B build/cpp/library -DCMAKE_BUILD_TYPE=$(or $(BUILD),Release) -DCMAKE_INSTALL_PREFIX=$(CURDIR)/build/cpp/installed > /dev/null
	$(BIN)/cmake --build build/cpp/library --parallel 2 --target install > /dev/null
	$(BIN)/cmake -S examples/cpp -B build/cpp/example -DCMAKE_PREFIX_PATH=$(CURDIR)/build/cpp/installed > /dev/null
	$(BIN)/cmake --build build/cpp/example > /dev/null
	$(BIN)/ctest --test-dir build/cpp/example --output-on-failure

## The same properties with many more cases, and the slow sweeps.
fuzz: $(VENV)/.dev
	SPECATTN_HYPOTHESIS=fuzz SPECATTN_GPU_CODE=whole $(BIN)/python -m pytest -n 2 -m "slow or not slow" $(ARGS)
	$(if $(ARGS),,$(MAKE) fuzz-triton36)

## Random calls of every primitive and small kernel, compiled by Triton 3.6 for sm_80 and sm_90 and executed in the emulator.
fuzz-triton36: $(VENV)/triton36/.done
	OMP_NUM_THREADS=1 $(VENV)/triton36/bin/python -m pytest -p no:cacheprovider -n 2 -m slow -k random \
	    $$(grep -l compiler_process tools/ptx/tests/test_*.py) $(ARGS)

## The C++ kernels' tests, 2000 random cases among them, with address and undefined-behaviour checks;
## CASES=ci for fewer, CASES=fuzz for many more.
sanitize: $(VENV)/.dev
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r python/specattn build/sanitize && cp -r reference triton_kernels build/sanitize/specattn
	rm -f build/sanitize/specattn/_cpu.*.so
	CFLAGS="-g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined" LDFLAGS="-fsanitize=address,undefined" \
	    $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/objects
	test -f build/sanitize/specattn/_cpu.*.so
	PYTHONPATH=build/sanitize SPECATTN_HYPOTHESIS=$(or $(CASES),sanitize) OMP_NUM_THREADS=2 \
	    ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(for library in asan ubsan stdc++; do \
	        $(CXX) -print-file-name=lib$$library.so; done | tr '\n' ' ')" \
	    $(BIN)/python -m pytest -p no:xdist tests/cpu $(ARGS)

## Every case of the GPU kernels, as each compiler makes them, executed in the emulator; then that is on record.
test-gpu-code: export SPECATTN_GPU_CODE = whole
test-gpu-code:
	$(MAKE) test ARGS="tools tests/triton_kernels tests/ops/test_nan_and_nothing.py $(ARGS)"
	$(BIN)/python -m tools.ptx.executed triton
	$(MAKE) test-triton36
	$(VENV)/triton36/bin/python -m tools.ptx.executed triton
	$(MAKE) test-cuda
	$(VENV)/cuda/bin/python -m tools.ptx.executed cuda

## The kernels as an older Triton compiles them: what they cost, and executed in the emulator (tools/ptx). Tests that compile nothing are left out.
test-triton36: $(VENV)/triton36/.done
	OMP_NUM_THREADS=1 $(VENV)/triton36/bin/python -m pytest -p no:cacheprovider -n 2 -m "not slow" \
	    tests/triton_kernels/test_compile.py $$(grep -l compiler_process tools/ptx/tests/test_*.py) $(ARGS)

## The CUDA C++ kernels, compiled by NVRTC and executed in the emulator; ARGS=-m slow for every case.
test-cuda: $(VENV)/cuda/.done
	OMP_NUM_THREADS=1 $(VENV)/cuda/bin/python -m pytest -p no:cacheprovider -n 2 -m "not slow" \
	    tools/ptx/tests/test_cuda.py tests/backends/test_cuda.py $(ARGS)

## Models whose weights torchao quantises (tests/decoding/model/test_quantised.py).
test-torchao: $(VENV)/torchao/.done
	OMP_NUM_THREADS=1 $(VENV)/torchao/bin/python -m pytest -p no:cacheprovider tests/decoding/model/test_quantised.py $(ARGS)

## vLLM with our attention and drafters in it: its texts are those of transformers.
test-vllm: .venv-vllm/.ready
	OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 \
	    VLLM_LOGGING_LEVEL=ERROR VLLM_CACHE_ROOT=$(CURDIR)/build/vllm VLLM_CONFIG_ROOT=$(CURDIR)/build/vllm \
	    .venv-vllm/bin/python -m pytest -p no:cacheprovider -m "not slow" tests/integrations/vllm $(ARGS)

## The roofline sweep of every primitive on this machine.
bench: $(VENV)/.dev
	$(BIN)/python bench/run_kernels.py $(ARGS)

## vLLM with specattn beside it, in a virtual environment of its own (2.3 GiB): docs/vllm.md.
vllm: .venv-vllm/.ready

## llama.cpp, a peer of bench/run_decoding.py, compiled here for this processor.
llama-cpp: .venv-llama-cpp/.ready

clean:
	rm -rf $(VENV) .venv-vllm .venv-llama-cpp build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

# An editable install is looked for last: a folder of its name beside a user's script, as this checkout may be, would hide it.
found_first = echo "$(CURDIR)/python" > "$$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/specattn.pth"

# torch first, in a step of its own: as a dependency of something else it may come with gigabytes of CUDA.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch requirements/demo.txt setup.py pyproject.toml $(wildcard csrc/cpu/* csrc/cpu/*/*)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	@echo "The CPU kernels are compiled now, once: some minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(call found_first,$(BIN))
	touch $@

# What one set of tests needs and others must not see; the other packages are those of $(VENV), which
# it looks in after its own.
$(VENV)/triton36/.done: WANTED = triton==3.6.0
$(VENV)/torchao/.done: WANTED = torchao==0.18.0
$(VENV)/cuda/.done: WANTED = -r requirements/cuda.txt
$(VENV)/cuda/.done: requirements/cuda.txt
$(VENV)/docs/.done: WANTED = -r requirements/docs.txt
$(VENV)/docs/.done: requirements/docs.txt
$(VENV)/triton36/.done $(VENV)/torchao/.done $(VENV)/cuda/.done: ALONE = --no-deps
$(VENV)/triton36/.done $(VENV)/torchao/.done $(VENV)/cuda/.done $(VENV)/docs/.done: $(VENV)/.dev
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(ALONE) $(WANTED)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
	touch $@

$(VENV)/.dev: $(VENV)/.demo requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

# Everything is named, so --no-deps: vLLM's own list would fetch torch again, and what a server needs.
.venv-vllm/.ready: requirements/vllm.txt setup.py pyproject.toml $(wildcard csrc/cpu/* csrc/cpu/*/*)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(call found_first,.venv-vllm/bin)
	touch $@

.venv-llama-cpp/.ready: requirements/llama-cpp.txt
	$(PYTHON) -m venv .venv-llama-cpp
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF" \
	    .venv-llama-cpp/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@
