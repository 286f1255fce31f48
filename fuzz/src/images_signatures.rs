//! Signatures, the documents that registries keep them in, and policies.

/// Parses `data` as each of them.
pub fn run(data: &[u8]) {
    podvisor_images::fuzzing::signatures(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("images_signatures", super::run);
    }
}
