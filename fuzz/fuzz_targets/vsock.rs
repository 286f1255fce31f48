//! See [`podvisor_fuzz::vsock`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::vsock::run(data));
