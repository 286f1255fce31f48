//! See [`podvisor_fuzz::net`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::net::run(data));
