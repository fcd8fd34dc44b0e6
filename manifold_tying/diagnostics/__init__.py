"""What a model's constraint does, in numbers."""

from manifold_tying.diagnostics._bases import principal_angles as principal_angles
from manifold_tying.diagnostics._interface import InterfaceConsistency as InterfaceConsistency
from manifold_tying.diagnostics._interface import delta_ti as delta_ti
from manifold_tying.diagnostics._interface import interface_consistency as interface_consistency
from manifold_tying.diagnostics._rotation import Phases as Phases
from manifold_tying.diagnostics._rotation import TraceProbe as TraceProbe
from manifold_tying.diagnostics._rotation import orthogonality_error as orthogonality_error
from manifold_tying.diagnostics._rotation import phases as phases
from manifold_tying.diagnostics._rotation import trace_probe as trace_probe
from manifold_tying.diagnostics._rotation import update_counts as update_counts
from manifold_tying.diagnostics._rotation import vector_probe as vector_probe
from manifold_tying.diagnostics._spectrum import SpectralSummary as SpectralSummary
from manifold_tying.diagnostics._spectrum import condition as condition
from manifold_tying.diagnostics._spectrum import eigenvalues as eigenvalues
from manifold_tying.diagnostics._spectrum import hyperspherical_energy as hyperspherical_energy
from manifold_tying.diagnostics._spectrum import singular_values as singular_values
from manifold_tying.diagnostics._spectrum import spectral_summary as spectral_summary
from manifold_tying.diagnostics._spectrum import svd_entropy as svd_entropy
from manifold_tying.linalg import defect as defect
