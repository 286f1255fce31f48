//! What a guest's agent writes.

/// Each line is the answer to some command, or refused.
pub fn run(data: &[u8]) {
    podvisor_guest_agent::fuzzing::run(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("guest_agent", super::run);
    }
}
