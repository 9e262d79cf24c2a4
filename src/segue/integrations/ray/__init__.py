"""Engines, their router and a trainer as actors of Ray; it needs ``segue[ray]`` once a fleet is started."""

from segue.integrations.ray.config import FleetConfig, TrainerConfig
from segue.integrations.ray.fleet import RayFleet

__all__ = ["FleetConfig", "RayFleet", "TrainerConfig"]
