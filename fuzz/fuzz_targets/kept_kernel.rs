//! See [`podvisor_fuzz::kept_kernel`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::kept_kernel::run(data));
