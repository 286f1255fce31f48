//! See [`podvisor_fuzz::dhcp`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::dhcp::run(data));
