//! See [`podvisor_fuzz::pmem`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::pmem::run(data));
