//! Fuzz targets: one per device, parser and file format.
//!
//! The body of each target is a module here with a function `run(&[u8])`, which neither
//! panics nor takes long whatever the bytes are. `fuzz_targets/` gives it to libFuzzer; the
//! tests of this crate give it the stored seeds and some thousand pseudo-random inputs
//! ([`smoke`]), so that a target that rots or a fault that came back shows without a fuzzer.
//!
//! A target of a device decodes its input as a program for a driver ([`driver`]) and runs it
//! against the device: descriptors, rings and registers filled with anything, and the host's
//! side of the device as well. [`transports`] has all devices behind their registers.

pub mod balloon;
pub mod blk;
pub mod cmdline;
pub mod console;
pub mod driver;
pub mod fs;
pub mod images_documents;
pub mod images_layers;
pub mod images_qcow2;
pub mod images_references;
pub mod images_signatures;
pub mod kernel;
pub mod mem;
pub mod mmio;
pub mod net;
pub mod overlay;
pub mod pci;
pub mod pmem;
pub mod rng;
pub mod serial;
pub mod smoke;
pub mod snapshot;
pub mod transports;
pub mod virtqueue;
pub mod vsock;
