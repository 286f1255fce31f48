//! What the daemon must not forget: one record for each pod sandbox and container, in one
//! database. Records are written before and after each step, so that a daemon that was killed
//! in between knows what may be left of it. What can be derived is not in them.

mod database;
mod kept;
mod protobuf;
mod records;

pub(crate) use database::{Database, StateError};
pub(crate) use kept::Kept;
pub(crate) use records::{
    ContainerExit, ContainerPhase, ContainerRecord, GuestSize, MemoryVolume, MountedImage,
    PodPhase, PodRecord, Record,
};
#[cfg(test)]
pub(crate) use records::{container_record, pod_record};
