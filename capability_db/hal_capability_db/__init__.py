"""The capability database: what each device is, can do and was measured at, with its sources."""

from hal_capability_db.database import Database
from hal_capability_db.errors import DatabaseError
from hal_capability_db.loader import load_database
from hal_capability_db.profiles import (
    Architecture,
    CollectiveLibrary,
    DetectionRules,
    DeviceProfile,
    FamilyProfile,
    Group,
    LinkMeasurement,
    PciDevice,
    Serving,
    Tell,
    TritonSupport,
)
from hal_capability_db.values import CONFIDENCES, MATRIX_DTYPES, Fact

__all__ = [
    "CONFIDENCES",
    "MATRIX_DTYPES",
    "Architecture",
    "CollectiveLibrary",
    "Database",
    "DatabaseError",
    "DetectionRules",
    "DeviceProfile",
    "Fact",
    "FamilyProfile",
    "Group",
    "LinkMeasurement",
    "PciDevice",
    "Serving",
    "Tell",
    "TritonSupport",
    "load_database",
]
