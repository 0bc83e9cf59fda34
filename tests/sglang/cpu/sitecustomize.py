"""Lets a torchvision wheel built for CUDA import beside a CPU build of torch; SGLang imports it and never uses it here."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_OPS = (
    "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


class _DeclareOps(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators the moment it is imported: the wheel registers shapes for them at once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if not torch.cuda.is_available():
            library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for op in _OPS:
                library.define(op + "(Tensor x) -> Tensor")
            torch._torchvision_ops = library  # type: ignore[attr-defined]  # keeps the declarations alive
        return None


sys.meta_path.insert(0, _DeclareOps())
