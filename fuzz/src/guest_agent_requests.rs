//! What a host writes to podvisor's own guest agent.

/// Each line is answered, or refused.
pub fn run(data: &[u8]) {
    podvisor_ga::fuzzing::run(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("guest_agent_requests", super::run);
    }
}
