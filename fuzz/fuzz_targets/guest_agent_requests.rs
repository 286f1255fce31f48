//! See [`podvisor_fuzz::guest_agent_requests`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| podvisor_fuzz::guest_agent_requests::run(data));
