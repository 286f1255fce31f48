//! See [`podvisor_fuzz::cmdline`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::cmdline::run(data));
