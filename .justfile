# Commands for developing pretrax: `uv run just` lists them, `uv run just test tests/config` runs one.

set positional-arguments  # "$@" keeps an argument with spaces in one piece

[private]
default:
    @just --list --unsorted

# train the quickstart: `just train steps=100 mesh.d=4`
train *OVERRIDES:
    uv run pretrax train configs/quickstart.yaml "$@"

# the fast tests, or those of some files: `just test tests/config -k mesh`
test *ARGUMENTS:
    uv run pytest "$@"

# all tests of some files, slow and nightly ones too
test-all +FILES:
    uv run pytest -n 0 -m '' "$@"

# the slow tests
slow *ARGUMENTS:
    uv run pytest -m slow "$@"

# format, and fix what ruff can fix
format:
    uv run ruff format && uv run ruff check --fix

# check format, lint and types
check:
    uv run ruff format --check && uv run ruff check && uv run pyright

# the documentation at http://127.0.0.1:8000, renewed as you write
docs:
    uv run --isolated --only-group docs mkdocs serve

# renew what is made from the source and committed: the JSON Schema of configurations, and pictures
reference:
    uv run pretrax config schema > configs/pretrax-schema.json && uv run python scripts/make_reference.py

# run the notebooks, and store their outputs
notebooks *FILES:
    uv run python scripts/run_notebooks.py "$@"

# every check that a change must pass
ci:
    .ci/run

# the tests that take too long for every change
nightly:
    .ci/nightly

# build and check the packages of a release
release *FLAGS:
    uv run python scripts/release.py "$@"
