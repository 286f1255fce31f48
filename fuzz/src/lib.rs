//! Fuzz targets: one per device, parser and file format.
//!
//! The body of each target is a module here with a function `run(&[u8])`, which neither panics nor
//! takes long for any input. `fuzz_targets/` passes it to libFuzzer; the tests of this crate run it
//! on the stored seeds and some thousand pseudo-random inputs ([`smoke`]), so that a broken target
//! or a regression is found without a fuzzer.
//!
//! A target of a device decodes its input as a program for a driver ([`driver`]) and runs it
//! against the device: descriptors, rings and registers with any content, and the host side of the
//! device as well. [`transports`] has all devices behind their registers.

pub mod balloon;
pub mod blk;
pub mod boot_entries;
pub mod cloud_init;
pub mod cmdline;
pub mod console;
pub mod dhcp;
pub mod disk_blocks;
pub mod disk_range;
pub mod driver;
pub mod firmware;
pub mod fs;
pub mod guest_agent;
pub mod guest_agent_requests;
pub mod images_documents;
pub mod images_layers;
pub mod images_qcow2;
pub mod images_references;
pub mod images_signatures;
pub mod kept_kernel;
pub mod kernel;
pub mod mem;
pub mod migration;
pub mod mmio;
pub mod net;
pub mod overlay;
pub mod pci;
pub mod pmem;
pub mod ports;
pub mod rng;
pub mod serial;
pub mod smoke;
pub mod snapshot;
pub mod transports;
pub mod upload_form;
pub mod virtqueue;
pub mod vsock;
