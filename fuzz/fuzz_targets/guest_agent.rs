//! See [`podvisor_fuzz::guest_agent`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::guest_agent::run(data));
