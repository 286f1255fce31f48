//! See [`podvisor_fuzz::blk`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::blk::run(data));
