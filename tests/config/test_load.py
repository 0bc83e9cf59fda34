"""Layers, origins, strictness and suggestions of a configuration."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import reef_cli
from reef_cli.config.load import load
from reef_cli.core.errors import ConfigError, MissingDependency, RecipeNotFound, UsageError

Write = Callable[[str], Path]


def test_flag_over_environment_over_file_over_default_with_origins(write: Write) -> None:
    file = write("reef:\n  port: 1\n  host: 10.0.0.1\nengine:\n  model: from-file\n")
    env = {"REEF_REEF__PORT": "2", "REEF_ENGINE__MODEL": "from-env", "REEF_HOME": "/h"}
    loaded = load(["--reef.port", "3"], env, file)
    assert (loaded.settings.reef.port, loaded.origins["reef.port"]) == (3, "--reef.port")
    assert (loaded.settings.engine.model, loaded.origins["engine.model"]) == ("from-env", "REEF_ENGINE__MODEL")
    assert (loaded.settings.reef.host, loaded.origins["reef.host"]) == ("10.0.0.1", "serve.yaml:3")
    assert (loaded.settings.reef.home, loaded.origins["reef.home"]) == ("/h", "REEF_HOME")
    assert (loaded.settings.trainer.rank, loaded.origins["trainer.rank"]) == (16, "default")


def test_nothing_given_is_all_defaults() -> None:
    loaded = load()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.recipe is None
    assert loaded.make_recipe() is None


@pytest.mark.parametrize(
    ("words", "section", "name", "value"),
    [
        (["--engine.kind=sglang"], "engine", "kind", "sglang"),
        (["--engine.max-running-requests", "4"], "engine", "max_running_requests", 4),
        (["--reef.implicit_scenarios", "no"], "reef", "implicit_scenarios", False),
        (["--telemetry.tracing"], "telemetry", "tracing", True),
        (["--reef.default_scenario", "null"], "reef", "default_scenario", None),
        (["--trainer.target_modules", "q_proj,v_proj"], "trainer", "target_modules", ("q_proj", "v_proj")),
        (["--trainer.alpha", "1e1"], "trainer", "alpha", 10.0),
        (["--evaluation.regression_margin", "-0.5"], "evaluation", "regression_margin", -0.5),
    ],
)
def test_flags_are_parsed_by_the_type_of_their_field(words: list[str], section: str, name: str, value: object) -> None:
    assert getattr(getattr(load(words).settings, section), name) == value


def test_free_mappings_merge_by_leaf(write: Write) -> None:
    file = write("engine:\n  sglang:\n    tp_size: 1\n    nested: {a: 1, b: 2}\n")
    loaded = load(["--engine.sglang.tp_size", "2"], {"REEF_ENGINE__SGLANG__NESTED__B": "3e-1"}, file)
    assert loaded.settings.engine.sglang == {"tp_size": 2, "nested": {"a": 1, "b": 0.3}}
    assert loaded.origins["engine.sglang"] == "serve.yaml:4, REEF_ENGINE__SGLANG__NESTED__B, --engine.sglang.tp_size"


def test_a_scalar_in_the_way_of_a_leaf_is_replaced(write: Write) -> None:
    file = write("engine:\n  sglang:\n    nested: 5\n")
    assert load(["--engine.sglang.nested.deep", "1"], {}, file).settings.engine.sglang == {"nested": {"deep": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reef:\n  port: '8900'\n", "serve.yaml:2: reef.port expects an integer, got '8900'"),
        ("reef:\n  port: true\n", "serve.yaml:2: reef.port expects an integer, got true"),
        ("reef:\n  port: 70000\n", "serve.yaml:2: reef.port must be 0 to 65535, not 70000"),
        ("reef:\n  home: 5\n", "reef.home expects text, got 5; put it in quotes"),
        ("reef:\n  implicit_scenarios: 1\n", "reef.implicit_scenarios expects true or false, got 1"),
        ("engine:\n  kind: embeded\n", "did you mean embedded?"),
        ("engine:\n  sglang: 5\n", "engine.sglang expects a mapping, got 5"),
        ("trainer:\n  alpha: .nan\n", "trainer.alpha must be finite"),
        ("trainer:\n  target_modules: q_proj\n", "trainer.target_modules expects a list (text each), got 'q_proj'"),
        ("evaluation:\n  alpha: 1.5\n", "evaluation.alpha must lie between 0 and 1"),
        ("engine:\n  kind: upstream\n", "an upstream engine needs its address"),
        ("trainer:\n  rank: 128\n", "is above engine.max_lora_rank (64)"),
        ("reef:\n  rate_per_s: 0\n", "reef.rate_per_s must be above 0"),
        ("reef:\n  import_limit_bytes: -1\n", "reef.import_limit_bytes must be above 0"),
        ("reef:\n  cors_origins: ['*']\n", "reef.cors_origins must be scheme://host[:port] each"),
        ("reef:\n  cors_origins: [https://ui.example/]\n", "without a path"),
        ("reef:\n  token: ''\n", "an empty token never authenticates"),
        ("reef:\n  port:\n    deeper: 1\n", "reef.port takes no keys below it"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_place_and_reason(write: Write, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load((), {}, write(text))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("reef:\n  prot: 1\n", "did you mean reef.port?"),
        ("reef:\n  model: x\n", "did you mean engine.model?"),
        ("engin:\n  kind: x\n", "did you mean engine?"),
        ("port: {a: 1}\n", "did you mean reef.port?"),
        ("storage:\n  zzz: 1\n", "keys of storage: keep_bytes"),
    ],
)
def test_unknown_keys_are_errors_with_a_suggestion(write: Write, text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load((), {}, write(text))
    assert hint in caught.value.hint


def test_unknown_environment_and_flags_too() -> None:
    with pytest.raises(ConfigError, match="REEF_ENGINE__KND: unknown key"):
        load((), {"REEF_ENGINE__KND": "x"})
    with pytest.raises(ConfigError, match="unexpected argument 'stray'"):
        load(["stray"])
    assert (
        load((), {"REEF_URL": "http://x", "REEF_SOMETHING": "y", "REEF_ENGINE__MODEL": ""}).origins["engine.model"] == "default"
    )


def test_all_problems_come_together(write: Write) -> None:
    file = write("reef:\n  prot: 1\n  port: x\nengine:\n  kind: nope\n")
    with pytest.raises(ConfigError) as caught:
        load((), {}, file)
    problems = caught.value.details["problems"]
    assert [problem["key"] for problem in problems] == ["reef.prot", "reef.port", "engine.kind"]
    assert "2 more" in caught.value.why


def test_substitution_takes_variables_defaults_and_literals(write: Write) -> None:
    file = write("reef:\n  port: ${PORT}\n  host: ${HOST:-127.0.0.2}\n  token: a${T}b\nengine:\n  model: $${kept}\n")
    loaded = load((), {"PORT": "8123", "T": "-"}, file)
    assert loaded.settings.reef.port == 8123
    assert loaded.settings.reef.host == "127.0.0.2"
    assert loaded.settings.reef.token == "a-b"
    assert loaded.settings.engine.model == "${kept}"
    assert loaded.origins["reef.port"] == "serve.yaml:2"


@pytest.mark.parametrize("env", [{}, {"TOK": ""}])
def test_an_unset_or_empty_variable_is_named_never_an_empty_token(write: Write, env: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load((), env, write("reef:\n  token: ${TOK}\n"))
    assert "serve.yaml:2: reef.token needs the environment variable TOK" in caught.value.message
    assert caught.value.details["variable"] == "TOK"


def test_an_unset_variable_that_a_flag_overrides_does_not_matter(write: Write) -> None:
    assert load(["--engine.model", "m"], {}, write("engine:\n  model: ${NOPE}\n")).settings.engine.model == "m"


def test_an_empty_token_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="REEF_TOKEN is set but empty"):
        load((), {"REEF_TOKEN": " "})


def test_secret_values_are_not_in_errors(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load((), {}, write("engine:\n  api_key: [hunter2]\nreef:\n  token: hun ter2\n"))
    assert "ter2" not in repr(caught.value.details) + caught.value.message


def test_missing_file_is_a_usage_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no config file x\.yaml") as caught:
        load((), {}, Path("x.yaml"))
    assert caught.value.exit_code == 2


def test_the_file_is_that_of_the_working_directory_not_of_the_installation(tmp_path: Path) -> None:
    installed, here = tmp_path / "site", tmp_path / "here"
    installed.mkdir(), here.mkdir()
    package = Path(reef_cli.__file__).parent
    for name in ("reef_cli", "recipes", "adapters", "templates"):
        (installed / name).symlink_to(package.parent / name)
    for folder, port in ((installed, 1111), (here, 2222)):
        (folder / "x.yaml").write_text(f"reef:\n  port: {port}\n")

    def shown(cwd: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "reef_cli", "config", "show", "-c", "./x.yaml", "--json"]
        env = {**os.environ, "PYTHONPATH": str(installed)}
        return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)

    done = shown(here)
    assert done.returncode == 0 and '"value": 2222' in done.stdout, done.stdout + done.stderr
    (here / "x.yaml").unlink()
    gone = shown(here)
    assert gone.returncode == 2 and "x.yaml" in gone.stdout and "1111" not in gone.stdout, gone.stdout


def test_recipe_settings_sit_beside_the_services_own(write: Write, recipes: Path) -> None:
    file = write("reef:\n  port: 1\n  recipe: toykit:ToyRecipe\n  batch_size: 1\n  lr: 1e-4\n  flavour: sour\n")
    loaded = load(["--reef.max_staleness", "18"], {}, file)
    assert loaded.settings.recipe_settings == {
        "batch_size": 1, "max_staleness": 18, "gate_every": 8, "lr": 1e-4, "flavour": "sour",
    }  # fmt: skip
    assert loaded.make_recipe().settings.lr == 1e-4
    assert loaded.origins["reef.lr"] == "serve.yaml:5"
    assert loaded.origins["reef.gate_every"] == "default"


def test_recipe_keys_are_checked_like_any_other(write: Write, recipes: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load((), {}, write("reef:\n  recipe: toykit:ToyRecipe\n  batchsize: 1\n  flavour: bitter\n"))
    assert caught.value.details["problems"][0]["hint"] == "did you mean reef.batch_size?"
    with pytest.raises(ConfigError, match="refuses its settings") as refused:
        load((), {}, write("reef:\n  recipe: toykit:ToyRecipe\n  lr: 2.0\n"))
    assert refused.value.why == "lr must be at most 1"


def test_recipe_keys_without_a_recipe_are_unknown(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"unknown key reef\.batch_size"):
        load((), {}, write("reef:\n  batch_size: 1\n"))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("toykit", "is no dotted path"),
        ("nowhere.at.all:X", "no recipe at nowhere.at.all:X"),
        ("toykit:ToyRecip", "has no class ToyRecip"),
        ("toykit:ToySettings", "is no recipe"),
    ],
)
def test_a_recipe_that_is_not_there(recipes: Path, path: str, says: str) -> None:
    with pytest.raises(RecipeNotFound, match=says) as caught:
        load(["--reef.recipe", path])
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_a_recipe_whose_code_is_unsound(recipes: Path) -> None:
    (recipes / "brokenkit.py").write_text("1 / 0\n")
    (recipes / "needykit.py").write_text("import package_that_is_not_there\n")
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        load(["--reef.recipe", "brokenkit:X"])
    assert "ZeroDivisionError" in caught.value.why
    with pytest.raises(MissingDependency, match="needs package_that_is_not_there"):
        load(["--reef.recipe", "needykit:X"])


def test_a_recipe_that_drags_tensors_into_the_server_is_refused(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipes / "transformers.py").write_text("")  # stands in for the real one, which takes seconds
    (recipes / "heavykit.py").write_text("import transformers\n")
    monkeypatch.syspath_prepend(str(recipes))
    import sys

    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    try:
        with pytest.raises(ConfigError, match="imports transformers into the server"):
            load(["--reef.recipe", "heavykit:X"])
    finally:
        sys.modules.pop("transformers", None)


def test_the_template_is_sound_and_every_key_in_it_is_known() -> None:
    template = Path(__file__).parents[2] / "templates" / "serve.yaml"
    assert set(load((), {}, template).origins.values()) == {"default"}
    keys = load().origins.keys() | {"reef.batch_size", "reef.max_staleness"}
    section = ""
    for line in template.read_text().splitlines():
        if line.endswith(":") and not line.startswith(("#", " ")):
            section = line[:-1]
        elif section and line.startswith("  # ") and ":" in line and line[4].islower():
            assert f"{section}.{line[4:].split(':')[0]}" in keys, line
