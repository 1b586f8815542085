"""The specification: every primitive in plain PyTorch, for any float dtype.

All attention here is one formula over the keys j that a query row sees,

    a_j = cap(softmax_scale * q . k_j)            cap(x) = softcap * tanh(x / softcap), or x
    lse = log(exp(sink) + sum_j exp(a_j))         without a sink, the sum alone
    out = sum_j exp(a_j - lse) v_j                no key: out = 0; nor sink: lse = -inf

and the primitives differ in which keys those are: the nodes of a tree, a cached prefix, a list of
cached positions. `merge_state` joins results over disjoint keys. Softmax and sums run in float32,
in float64 for float64 inputs. Shapes use B requests, T query rows, S tree keys, N cache capacity,
Hq query heads, Hk KV heads, g = Hq / Hk, D head_dim and Dv that of values, which is D mostly.
"""

import importlib
import pkgutil

from .tree_mask import pack_tree_mask, tree_depths, trim_tree_mask, unpack_tree_mask

__all__ = ["pack_tree_mask", "tree_depths", "trim_tree_mask", "unpack_tree_mask"]

# A primitive is the function that its file is named after; here it takes the module's place.
for _file in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_file.name}")
    if hasattr(_module, _file.name):
        globals()[_file.name] = getattr(_module, _file.name)
        __all__.append(_file.name)
