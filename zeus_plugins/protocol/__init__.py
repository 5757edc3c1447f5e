"""The messages between trainings and the batch size optimization server.

Zeus 0.16 fixes the five routes under "wire contract" in `Paths`, with their statuses and fields: a Zeus client works
with our server, and our client with a Zeus server. All other fields are optional on the wire. Fields of Zeus keep their
names (``time``, ``energy``, ``max_power``); our own fields carry their unit.

Both packages import this one. Its modules are private; names imported as themselves are public.
"""

from __future__ import annotations

from zeus_plugins.protocol._jobs import FIXED_TERMS as FIXED_TERMS
from zeus_plugins.protocol._jobs import TARGET_RUNS as TARGET_RUNS
from zeus_plugins.protocol._jobs import CreatedJob as CreatedJob
from zeus_plugins.protocol._jobs import Fingerprint as Fingerprint
from zeus_plugins.protocol._jobs import GpuConfig as GpuConfig
from zeus_plugins.protocol._jobs import JobParams as JobParams
from zeus_plugins.protocol._jobs import JobSpec as JobSpec
from zeus_plugins.protocol._jobs import JobSpecFromClient as JobSpecFromClient
from zeus_plugins.protocol._jobs import LearnedEpochs as LearnedEpochs
from zeus_plugins.protocol._jobs import TrialId as TrialId
from zeus_plugins.protocol._jobs import WarmStart as WarmStart
from zeus_plugins.protocol._jobs import terms_between as terms_between
from zeus_plugins.protocol._trials import Ending as Ending
from zeus_plugins.protocol._trials import EndingState as EndingState
from zeus_plugins.protocol._trials import Evaluation as Evaluation
from zeus_plugins.protocol._trials import Heartbeat as Heartbeat
from zeus_plugins.protocol._trials import HeartbeatResponse as HeartbeatResponse
from zeus_plugins.protocol._trials import OfflineTrial as OfflineTrial
from zeus_plugins.protocol._trials import PowerLimitChoice as PowerLimitChoice
from zeus_plugins.protocol._trials import ReportResponse as ReportResponse
from zeus_plugins.protocol._trials import StopRule as StopRule
from zeus_plugins.protocol._trials import TrainingResult as TrainingResult
from zeus_plugins.protocol._trials import TrialDispatch as TrialDispatch
from zeus_plugins.protocol._trials import TrialEnd as TrialEnd
from zeus_plugins.protocol._trials import Verdict as Verdict
from zeus_plugins.protocol._values import ALIVE as ALIVE
from zeus_plugins.protocol._values import BUSY_SHARE as BUSY_SHARE
from zeus_plugins.protocol._values import CONTROLS as CONTROLS
from zeus_plugins.protocol._values import FINAL as FINAL
from zeus_plugins.protocol._values import GP_VOI as GP_VOI
from zeus_plugins.protocol._values import ID_PATTERN as ID_PATTERN
from zeus_plugins.protocol._values import LEAST_TIME_S as LEAST_TIME_S
from zeus_plugins.protocol._values import MAX_BATCH_SIZE as MAX_BATCH_SIZE
from zeus_plugins.protocol._values import MAX_DETAIL_LENGTH as MAX_DETAIL_LENGTH
from zeus_plugins.protocol._values import MAX_ID_LENGTH as MAX_ID_LENGTH
from zeus_plugins.protocol._values import MAX_MARGINS as MAX_MARGINS
from zeus_plugins.protocol._values import MAX_WATCHED as MAX_WATCHED
from zeus_plugins.protocol._values import OWN_POLICIES as OWN_POLICIES
from zeus_plugins.protocol._values import ZEUS as ZEUS
from zeus_plugins.protocol._values import BatchSize as BatchSize
from zeus_plugins.protocol._values import EndReason as EndReason
from zeus_plugins.protocol._values import Epochs as Epochs
from zeus_plugins.protocol._values import Finite as Finite
from zeus_plugins.protocol._values import Identifier as Identifier
from zeus_plugins.protocol._values import Joules as Joules
from zeus_plugins.protocol._values import MetricName as MetricName
from zeus_plugins.protocol._values import NonNegativeFinite as NonNegativeFinite
from zeus_plugins.protocol._values import NonNegativeInt as NonNegativeInt
from zeus_plugins.protocol._values import Origin as Origin
from zeus_plugins.protocol._values import Paths as Paths
from zeus_plugins.protocol._values import PositiveInt as PositiveInt
from zeus_plugins.protocol._values import Quality as Quality
from zeus_plugins.protocol._values import RefusalReason as RefusalReason
from zeus_plugins.protocol._values import RegistrationId as RegistrationId
from zeus_plugins.protocol._values import Seconds as Seconds
from zeus_plugins.protocol._values import Seed as Seed
from zeus_plugins.protocol._values import Stage as Stage
from zeus_plugins.protocol._values import Text as Text
from zeus_plugins.protocol._values import TrialState as TrialState
from zeus_plugins.protocol._values import Watched as Watched
from zeus_plugins.protocol._values import Watts as Watts
from zeus_plugins.protocol._values import WireMessage as WireMessage
from zeus_plugins.protocol._values import busy_remark as busy_remark
from zeus_plugins.protocol._values import certain_direction as certain_direction
from zeus_plugins.protocol._values import cost as cost
from zeus_plugins.protocol._values import epochs_in_words as epochs_in_words
from zeus_plugins.protocol._values import faults_in_words as faults_in_words
from zeus_plugins.protocol._values import finishing_reason as finishing_reason
from zeus_plugins.protocol._values import is_busy as is_busy
from zeus_plugins.protocol._values import is_estimated as is_estimated
from zeus_plugins.protocol._values import is_higher_better as is_higher_better
from zeus_plugins.protocol._values import is_lower_better as is_lower_better
from zeus_plugins.protocol._values import is_time_alone as is_time_alone
from zeus_plugins.protocol._values import package_version as package_version
from zeus_plugins.protocol._values import printable as printable
from zeus_plugins.protocol._views import MAX_CANDIDATES as MAX_CANDIDATES
from zeus_plugins.protocol._views import AmountSaved as AmountSaved
from zeus_plugins.protocol._views import ArmView as ArmView
from zeus_plugins.protocol._views import CandidateWorth as CandidateWorth
from zeus_plugins.protocol._views import Change as Change
from zeus_plugins.protocol._views import Decision as Decision
from zeus_plugins.protocol._views import ErrorBody as ErrorBody
from zeus_plugins.protocol._views import Explanation as Explanation
from zeus_plugins.protocol._views import FieldError as FieldError
from zeus_plugins.protocol._views import Instant as Instant
from zeus_plugins.protocol._views import JobList as JobList
from zeus_plugins.protocol._views import JobSummary as JobSummary
from zeus_plugins.protocol._views import JobView as JobView
from zeus_plugins.protocol._views import MetricView as MetricView
from zeus_plugins.protocol._views import Revision as Revision
from zeus_plugins.protocol._views import SavingsView as SavingsView
from zeus_plugins.protocol._views import SavingsWord as SavingsWord
from zeus_plugins.protocol._views import Share as Share
from zeus_plugins.protocol._views import SizeBelief as SizeBelief
from zeus_plugins.protocol._views import TrialFacts as TrialFacts
from zeus_plugins.protocol._views import TrialList as TrialList
from zeus_plugins.protocol._views import TrialView as TrialView
from zeus_plugins.protocol._views import changes_in_words as changes_in_words
from zeus_plugins.protocol._views import joules_in_words as joules_in_words
