"""Token interfaces: embedding and head in one module."""

from manifold_tying.tying._embedding import PITEmbedding as PITEmbedding
from manifold_tying.tying._free_pit import FreePIT as FreePIT
from manifold_tying.tying._loss import LossOptions as LossOptions
from manifold_tying.tying._loss import linear_cross_entropy as linear_cross_entropy
from manifold_tying.tying._manifold_pit import ManifoldPIT as ManifoldPIT
from manifold_tying.tying._parallel import shard_model as shard_model
from manifold_tying.tying._parallel import shard_vocabulary as shard_vocabulary
from manifold_tying.tying._pit import PIT as PIT
from manifold_tying.tying._pit import Memory as Memory
from manifold_tying.tying._pit import Transform as Transform
from manifold_tying.tying.interface import TokenInterface as TokenInterface
from manifold_tying.tying.interface import TransposeTying as TransposeTying
from manifold_tying.tying.interface import Untied as Untied
from manifold_tying.tying.interface import tied_std as tied_std
