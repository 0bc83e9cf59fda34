"""What is shown of a configuration: re-readable, with origins, without secrets; its schema and documentation."""

import json
from collections.abc import Callable
from pathlib import Path

import yaml

from reef_cli.config.docs import field_docs, summary
from reef_cli.config.json_schema import settings_schema
from reef_cli.config.keys import SECTIONS, key_table, section_type
from reef_cli.config.load import load
from reef_cli.config.paths import Home, cache_at, home_at
from reef_cli.config.recipes import resolve_recipe
from reef_cli.config.render import render_config
from reef_cli.config.schema import ReefSettings

Write = Callable[[str], Path]
SECRETS = """\
reef:
  token: s3cret-a
  tokens: [s3cret-b]
engine:
  kind: upstream
  url: https://me:s3cret-c@host/v1
  api_key: s3cret-d
  sglang: {api-key: s3cret-e, tp_size: 2, max_new_tokens: 5}
"""


def test_secrets_are_masked_and_nothing_else(write: Write) -> None:
    text = render_config(load((), {}, write(SECRETS)))
    assert "s3cret" not in text
    assert "https://********@host/v1" in text
    assert "tp_size: 2" in text
    assert "max_new_tokens: 5" in text
    assert "s3cret-d" in render_config(load((), {}, write(SECRETS)), mask=False)


def test_the_rendering_is_yaml_with_an_origin_on_every_line_and_loads_to_the_same(write: Write, tmp_path: Path) -> None:
    loaded = load(["--trainer.alpha", "1e-3", "--reef.host", "# odd: 'one"], {}, write(SECRETS))
    text = render_config(loaded, mask=False)
    assert all("  # " in line for line in text.splitlines() if line.startswith("  "))
    assert "port: 8900  # default" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load((), {}, again).settings == loaded.settings


def test_changed_only_leaves_defaults_out(write: Write) -> None:
    text = render_config(load(["--reef.port", "1"]), changed_only=True)
    assert text == "reef:\n  port: 1  # --reef.port\n"
    assert yaml.safe_load(render_config(load(), changed_only=True)) == {}


def test_the_schema_knows_every_key_with_its_documentation() -> None:
    schema = settings_schema()
    json.dumps(schema)
    for (section, name), key in key_table().items():
        entry = schema["properties"][section]["properties"][name]
        assert entry["description"], key.dotted
        assert "default" in entry, key.dotted
    assert schema["additionalProperties"] is False
    assert schema["properties"]["engine"]["additionalProperties"] is False
    assert schema["properties"]["reef"]["additionalProperties"] is True


def test_the_schema_of_a_recipe_is_closed_and_has_its_keys(recipes: Path) -> None:
    reef = settings_schema(resolve_recipe("toykit:ToyRecipe"))["properties"]["reef"]
    assert reef["additionalProperties"] is False
    assert reef["properties"]["lr"]["description"] == "Step size."
    assert {"enum": ["sweet", "sour"]} in reef["properties"]["flavour"]["anyOf"]


def test_every_setting_has_a_docstring() -> None:
    for section in SECTIONS:
        owner = section_type(section)
        assert summary(owner)
        assert set(field_docs(owner)) == set(owner.__dataclass_fields__), section
    assert field_docs(ReefSettings)["port"] == "Port to listen on; 0 picks a free one."


def test_docs_of_a_recipe_include_inherited_ones(recipes: Path) -> None:
    docs = field_docs(resolve_recipe("toykit:ToyRecipe").settings_type)
    assert docs["flavour"] == "Taste of the loss."
    assert docs["batch_size"].startswith("Samples per training step")


def test_home_is_private_and_where_it_was_asked_for(tmp_path: Path) -> None:
    loose = tmp_path / "home"
    loose.mkdir(mode=0o755)
    home = Home(loose).prepare()
    for folder in (home.root, home.run, home.logs, home.checkpoints):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert home_at(None, {"REEF_HOME": "/e"}).root == Path("/e")
    assert home_at("/f", {"REEF_HOME": "/e"}).root == Path("/f")
    assert home_at(None, {}).root == Path.cwd() / ".reef"
    assert cache_at({"REEF_CACHE": "/c"}) == Path("/c")
    assert cache_at({"XDG_CACHE_HOME": "/x"}) == Path("/x/reef")
