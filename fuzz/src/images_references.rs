//! Names of images, URLs of disk images and checksums, as users type them.

/// Half of all inputs are used as they are, the other half are composed of typical parts of names.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    if first & 1 == 0 {
        podvisor_images::fuzzing::names(&String::from_utf8_lossy(rest));
        return;
    }
    const PARTS: [&str; 32] = [
        "https://",
        "HTTP://",
        "http:",
        "//",
        "/",
        ":",
        "@",
        "?",
        "#",
        ".",
        "..",
        "-",
        "_",
        "__",
        "%40",
        "%",
        "[::1]",
        "127.0.0.1",
        "localhost",
        "docker.io",
        "index.docker.io",
        "library",
        "busybox",
        "A",
        "a",
        "0",
        ":443",
        "sha256:",
        "sha512:",
        "0123456789abcdef",
        "é",
        " ",
    ];
    let text: String = rest
        .iter()
        .map(|byte| PARTS[usize::from(byte % 32)])
        .collect();
    podvisor_images::fuzzing::names(&text);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("images_references", super::run);
    }
}
