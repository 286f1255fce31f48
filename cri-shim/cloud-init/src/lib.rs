//! The disk from which a guest's cloud-init configures it.
//!
//! A [`GuestSeed`] says who the guest is and what it is to have; [`GuestSeed::volume`] makes the
//! documents of NoCloud or ConfigDrive of it, on a FAT [volume](fat::Volume). What users wrote is
//! read with bounds, and all that is wrong with it is told at once, before anything is created.
//!
//! This crate must not know pods, annotations or virtual machines: its input is plain.

mod agent;
mod documents;
mod error;
pub mod fat;
mod files;
mod ignition;
mod keys;
mod network;
mod scripts;
mod user_data;
pub mod yaml;

pub use documents::{Form, GuestSeed};
pub use error::{SeedError, SeedErrors};
pub use files::GuestFile;
pub use ignition::{IgnitionError, MAX_IGNITION, check_ignition};
pub use keys::ssh_keys;
pub use network::{Dhcp, Network, NetworkConfig, NetworkNic, NetworkRoute};
pub use scripts::{DeviceLink, GuestMount, MountSource};
pub use user_data::UserData;
