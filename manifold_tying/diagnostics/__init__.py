"""What a model's constraint does, in numbers."""

from manifold_tying.diagnostics._interface import condition as condition
from manifold_tying.diagnostics._interface import delta_ti as delta_ti
from manifold_tying.diagnostics._spectrum import SpectralSummary as SpectralSummary
from manifold_tying.diagnostics._spectrum import hyperspherical_energy as hyperspherical_energy
from manifold_tying.diagnostics._spectrum import singular_values as singular_values
from manifold_tying.diagnostics._spectrum import spectral_summary as spectral_summary
from manifold_tying.diagnostics._spectrum import svd_entropy as svd_entropy
from manifold_tying.linalg import defect as defect
