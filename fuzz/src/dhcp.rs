//! Frames of a guest to its DHCP server.

/// Each frame is answered or refused.
pub fn run(data: &[u8]) {
    podvisor_dhcp::fuzzing::run(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("dhcp", super::run);
    }
}
