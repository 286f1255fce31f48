//! The daemon's persistent state: one record for each pod sandbox and container, in one database.
//! Records are written before and after each step, so that after a daemon was killed in between,
//! the next one knows what may be left. Records do not contain what can be derived.

mod cached_record;
mod database;
mod protobuf;
mod records;
mod vm_record;

pub(crate) use cached_record::CachedRecord;
pub(crate) use database::{DATABASE, Database, StateError};
pub(crate) use records::{
    ContainerExit, ContainerPhase, ContainerRecord, GuestSize, MemoryVolume, MountedImage,
    PodPhase, PodRecord, Record,
};
#[cfg(test)]
pub(crate) use records::{container_record, pod_record};
#[cfg(test)]
pub(crate) use vm_record::OverlayKind;
pub(crate) use vm_record::{
    DiskContent, DiskRecord, KernelRecord, NodeFile, OverlayRecord, ROOT, VmRecord,
};
