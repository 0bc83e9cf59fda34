"""Hypothesis strategies for sound entries and trees."""

from hypothesis import strategies as st

from reef_cli.harness.tree import Entry, Tree

IDS = st.sampled_from([f"e{n}" for n in range(6)])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=40).filter(
    lambda text: text.strip() and "---" not in text
)


@st.composite
def entries(draw: st.DrawFn, entry_id: str) -> Entry:
    kind = draw(st.sampled_from(["rules", "system", "skill", "command", "config", "mcp", "extension"]))
    text = draw(TEXT)
    config: dict[str, object] = {"text": text}
    if kind == "skill":
        data = draw(st.binary(max_size=12))
        config |= {
            "description": draw(TEXT),
            "files": {
                "scripts/run.sh": {"text": text, "executable": True},
                "data.bin": {"base64": __import__("base64").b64encode(data).decode()},
            },
        }
    elif kind == "config":
        config = {"value": {draw(st.sampled_from(["a", "b"])): draw(st.integers())}}
    elif kind == "mcp":
        config = {"command": "server", "args": [draw(st.sampled_from(["-x", "serve"]))]}
    elif kind == "extension":
        config |= {"adapter": "pi", "suffix": "ts"}
    return Entry(entry_id, kind, config)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    names = draw(st.lists(IDS, unique=True, max_size=5))
    return Tree.of([draw(entries(name)) for name in names])
