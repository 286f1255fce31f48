//! Manifests, configurations, challenges and names from a registry.

/// Parses `data` as each of them.
pub fn run(data: &[u8]) {
    podvisor_images::fuzzing::documents(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("images_documents", super::run);
    }
}
