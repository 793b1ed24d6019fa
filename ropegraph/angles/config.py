"""Reading rope parameters as Hugging Face writes them: a dictionary, or a config that has one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from ropegraph.errors import GraphError

# Names that model files have and transformers itself replaces.
_OLD_NAMES = {"mrope": "default", "su": "longrope"}


class Given(NamedTuple):
    """What was found: rope_type, its parameters without the name, and what a config adds."""

    rope_type: str
    parameters: dict[str, Any]
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    ignore_keys: frozenset[str] = frozenset()


def read(source: object, layer_type: str | None) -> Given:
    """Read a rope_parameters dictionary, or an object with such an attribute; changes neither."""
    if isinstance(source, Mapping):
        return _named(_of_layer(cast("Mapping[str, Any]", source), layer_type))
    written = getattr(source, "rope_parameters", None) or getattr(source, "rope_scaling", None)
    if not isinstance(written, Mapping) and getattr(source, "rope_theta", None) is None:
        raise GraphError(
            f"inv_freq: {type(source).__name__} has no rope_parameters; use a dictionary or a "
            "config with them (one of several models has them in its text_config or vision_config)"
        )
    config = _config_of_layer(source, layer_type)
    found = _of_layer(cast("Mapping[str, Any]", written or {}), layer_type)
    given = _named(_with_defaults(config, found, nested=layer_type is not None))
    ignored = cast("Iterable[str]", getattr(source, "ignore_keys_at_rope_validation", None) or ())
    return given._replace(
        head_dim=_head_dim(config, given.rope_type),
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        ignore_keys=frozenset(ignored),
    )


def _of_layer(written: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The parameters of one layer type, of those nested in the dictionary."""
    nested = [key for key, value in written.items() if isinstance(value, Mapping)]
    if whole := {"rope_parameters", "rope_scaling"} & written.keys():
        key = min(whole)
        raise GraphError(
            f"inv_freq: this dictionary is a whole configuration, it has {key!r}; use its "
            f"dictionary {key!r} with 'rope_theta' in it, or the configuration object"
        )
    if not nested:
        if layer_type is not None:
            raise GraphError(
                f"inv_freq: layer_type={layer_type!r:.60}, but rope_parameters is not nested by "
                "layer type; leave layer_type out"
            )
        return dict(written)
    if layer_type is None or layer_type not in nested:
        raise GraphError(
            f"inv_freq: layer_type={layer_type!r:.60}; rope_parameters is nested: "
            f"use one of {', '.join(map(repr, nested))}"
        )
    return dict(written[layer_type])


def _named(parameters: dict[str, Any]) -> Given:
    """Take the name out; a parameter that is None says nothing, as in transformers."""
    found = {key: value for key, value in parameters.items() if value is not None}
    old = found.pop("type", None)
    name = found.pop("rope_type", old or "default")
    if not isinstance(name, str):
        raise GraphError(f"inv_freq: rope_type={name!r:.60}; use a name such as 'yarn'")
    if name == "mrope" and "mrope_section" not in found:
        raise GraphError("inv_freq: rope_type='mrope' without mrope_section; give it")
    return Given(_OLD_NAMES.get(name, name), found)


def _config_of_layer(config: object, layer_type: str | None) -> object:
    """The config of one layer type, where layers differ in more than rope_parameters."""
    layers = getattr(config, "per_layer_config", None)
    if layer_type is None or layers is None:
        return config
    try:
        return layers[layer_type]
    except (LookupError, TypeError, ValueError):
        return config


def _with_defaults(config: object, found: dict[str, Any], *, nested: bool) -> dict[str, Any]:
    """Fill in what transformers fills in from attributes of the config."""
    found = {key: value for key, value in found.items() if value is not None}
    name = found.get("rope_type", found.get("type", "default"))
    if name == "default":
        found["rope_type"] = getattr(config, "default_rope_type", name)
    theta = getattr(config, "rope_theta", None) or getattr(config, "default_theta", None)
    found.setdefault("rope_theta", theta)
    found.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if _OLD_NAMES.get(name, name) in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        if not nested and (own := getattr(config, key, None)) is not None:
            found[key] = own
        found.setdefault(key, getattr(config, "max_position_embeddings", None))
    return found


def _head_dim(config: object, rope_type: str) -> int | None:
    """head_dim, or the width of the model over its heads."""
    if head_dim := getattr(config, "head_dim", None):
        return head_dim
    # In Qwen2-VL's vision config hidden_size is the width of the language model.
    own = getattr(config, "embed_dim", None) if rope_type == "axial" else None
    width = own or getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    return width // heads if width and heads else None
