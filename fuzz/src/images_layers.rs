//! Image layers from an untrusted source.

use arbitrary::{Arbitrary, Unstructured};

/// The size of a tar header.
const RECORD: usize = 512;

#[derive(Arbitrary, Debug)]
struct Entry {
    path: Vec<u8>,
    kind: u8,
    link: Vec<u8>,
    size: u16,
    data: Vec<u8>,
    next_layer: bool,
}

/// Half of all inputs are layers as they are, the other half describe entries with valid headers.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    if first & 1 == 0 {
        podvisor_images::fuzzing::layers(&[rest]);
        return;
    }
    let mut input = Unstructured::new(rest);
    let mut layers = vec![Vec::new()];
    while let Ok(entry) = Entry::arbitrary(&mut input) {
        if entry.next_layer && layers.len() < 4 {
            layers.push(Vec::new());
        }
        if let Some(layer) = layers.last_mut() {
            append(layer, &entry);
        }
        if input.is_empty() {
            break;
        }
    }
    let layers: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
    podvisor_images::fuzzing::layers(&layers);
}

fn append(tar: &mut Vec<u8>, entry: &Entry) {
    let mut header = [0; RECORD];
    let mut put = |at: usize, max: usize, bytes: &[u8]| {
        let length = bytes.len().min(max);
        header[at..at + length].copy_from_slice(&bytes[..length]);
    };
    put(0, 100, &entry.path);
    put(100, 8, b"0000644\0");
    put(124, 12, format!("{:011o}\0", entry.size).as_bytes());
    put(148, 8, b"        ");
    // Mostly existing types.
    let kinds = b"0123456xgLKS";
    put(
        156,
        1,
        &[*kinds.get(usize::from(entry.kind)).unwrap_or(&entry.kind)],
    );
    put(157, 100, &entry.link);
    put(257, 8, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.extend_from_slice(&header);
    tar.extend_from_slice(&entry.data);
    tar.resize(tar.len().next_multiple_of(RECORD), 0);
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("images_layers", super::run);
    }
}
