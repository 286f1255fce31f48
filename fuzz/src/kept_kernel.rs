//! The block that the loader describes a kernel by.

use podvisor_kept_kernel::{BLOCK, DISK_BYTES, Frame};

/// What is accepted lies within the disk, says nothing that a terminal obeys, and is the same once
/// it is written again.
pub fn run(data: &[u8]) {
    let mut block = [0; BLOCK];
    for (to, from) in block.iter_mut().zip(data) {
        *to = *from;
    }
    let Ok(frame) = Frame::parse(&block) else {
        return;
    };
    let kernel = frame.kernel();
    assert!(kernel.start < kernel.end && kernel.end <= DISK_BYTES);
    if let Some(initramfs) = frame.initramfs() {
        assert!(kernel.end <= initramfs.start && initramfs.end <= DISK_BYTES);
    }
    let texts = [frame.cmdline(), frame.title()];
    assert!(!texts.iter().any(|text| text.chars().any(char::is_control)));
    assert_eq!(Frame::parse(&frame.to_block()), Ok(frame));
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_block_is_within_its_disk_or_refused() {
        crate::smoke::run("kept_kernel", super::run);
    }
}
