//! See [`podvisor_fuzz::kernel`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::kernel::run(data));
