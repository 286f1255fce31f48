//! See [`podvisor_fuzz::virtqueue`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::virtqueue::run(data));
