"""Every field of a JSON configuration, edited in every way that a folder may have it wrong."""

import copy
import json
import math

MISSING = object()
NULL = None
WRONG = {
    "null": NULL,
    "missing": MISSING,
    "string": "x",
    "list": [1, "x"],
    "negative": -1,
    "zero": 0,
    "huge": 10**30,
    "float": 1.5,
    "nested": {"x": {}},
    "flag": True,
    "nan": math.nan,
    "endless": 10**400,
}


def paths(config, before=()):
    """Yield the way to every field, those of objects behind the object itself."""
    for name, value in config.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def edited(config, path, value):
    """Return a copy whose field at `path`, new or not, has another value, or none."""
    changed = copy.deepcopy(config)
    inner = changed
    for name in path[:-1]:
        if inner.get(name) is None:
            inner[name] = {}
        inner = inner[name]
    if value is MISSING:
        inner.pop(path[-1], None)
    else:
        inner[path[-1]] = value
    return changed


def write(folder, config):
    """Write ``config.json``, with NaN and all, as Python does."""
    file = folder / "config.json"
    file.unlink(missing_ok=True)  # file systems may wait for the disk where one is overwritten
    file.write_text(json.dumps(config), encoding="utf-8")


def verdict(load, path, default):
    """Return what is wrong with what `load` does; "" where it is right.

    Right is an error that names the field, or whatever `default` holds for, given the result.
    """
    try:
        found = load()
    except (ValueError, TypeError) as error:
        said = str(error)
        if path[-1] in said and "NoneType" not in said:
            return ""
        return f"{type(error).__name__} does not name {path[-1]}: {said}"
    except Exception as error:  # what a user must not see
        return f"{type(error).__name__}: {error}"
    return default(found)
