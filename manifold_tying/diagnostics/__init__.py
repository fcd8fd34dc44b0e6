"""What a model's constraint does, in numbers."""

from manifold_tying.diagnostics._interface import condition as condition
from manifold_tying.diagnostics._interface import delta_ti as delta_ti
from manifold_tying.linalg import defect as defect
