//! Builds the test host: Debian's kernel package, unpacked, and an initramfs with busybox, the
//! modules in load order, and the two scripts next to this file.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process::{self, Lock};
use crate::report::Step;
use crate::{deb, paths};

/// Modules that must be loaded before the command runs: the transports to this machine, then KVM
/// and what tests of guests use. `modprobe` finds all others in /lib/modules.
const MODULES: &[&str] = &[
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "crc32c_generic",
    "overlay",
    "virtio_console",
    "kvm_amd",
    "tun",
    "vhost_vsock",
    "vhost_net",
    "loop",
    "bridge",
    "veth",
    "dummy",
    "br_netfilter",
    "nf_tables",
    "virtio_blk",
    "virtio_net",
    "ext4",
    "erofs",
];

const INIT: &str = include_str!("init.sh");
const STAGE2: &str = include_str!("stage2.sh");

/// A built test host.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    /// The kernel's release, as reported by `uname -r`.
    pub(crate) release: String,
    /// Its modules.
    pub(crate) modules: PathBuf,
}

impl Image {
    fn open(directory: &Path) -> Option<Self> {
        let release = fs::read_to_string(directory.join("release")).ok()?;
        Some(Self {
            kernel: directory.join("vmlinux"),
            initramfs: directory.join("initramfs.cpio"),
            modules: directory.join("lib/modules").join(&release),
            release,
        })
    }
}

/// Builds the test host if it is missing.
pub(crate) fn ensure() -> Result<Image> {
    let busybox = busybox()?;
    let digest = process::sha256(&busybox)?;
    let key = process::key(&[INIT, STAGE2, &format!("{MODULES:?}"), &digest])?;
    let directory = paths::host().join(key);
    if let Some(image) = Image::open(&directory) {
        return Ok(image);
    }
    let _lock = Lock::take(&paths::host())?;
    if let Some(image) = Image::open(&directory) {
        return Ok(image);
    }
    let kernel = kernel()?;
    let step = Step::begin("making the test host's initramfs");
    let partial = directory.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir_all(partial.join("lib/modules"))?;
    // The kernel is shared by every initramfs made for it.
    fs::hard_link(kernel.directory.join("vmlinux"), partial.join("vmlinux"))?;
    // Relative, so that the tree can be copied or moved.
    let kernels = kernel.directory.strip_prefix(paths::host())?;
    std::os::unix::fs::symlink(
        Path::new("../../..")
            .join(kernels)
            .join("lib/modules")
            .join(&kernel.release),
        partial.join("lib/modules").join(&kernel.release),
    )?;
    let modules = load_order(&kernel)?;
    let file = fs::File::create(partial.join("initramfs.cpio"))?;
    write_initramfs(std::io::BufWriter::new(file), &busybox, &modules)
        .context("the test host's initramfs cannot be written")?;
    // Last, because it marks the directory as complete.
    fs::write(partial.join("release"), &kernel.release)?;
    if directory.exists() {
        fs::remove_dir_all(&directory)?;
    }
    fs::rename(&partial, &directory)?;
    step.done();
    Image::open(&directory).context("the test host was built, but cannot be found")
}

fn busybox() -> Result<PathBuf> {
    ["/bin/busybox", "/usr/bin/busybox"]
        .iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
        .context("no /bin/busybox; install Debian's busybox-static")
}

/// Debian's kernel, unpacked: `vmlinux` and `lib/modules/RELEASE`.
#[derive(Debug)]
struct Kernel {
    directory: PathBuf,
    release: String,
}

/// Returns Debian's kernel as shipped, a bzImage, like users' own kernels.
pub(crate) fn distribution_kernel() -> Result<PathBuf> {
    Ok(kernel()?.directory.join("vmlinuz"))
}

/// Downloads the kernel that `linux-image-amd64` currently depends on, or uses the one that was
/// downloaded before.
fn kernel() -> Result<Kernel> {
    let parent = paths::host().join("kernel");
    fs::create_dir_all(&parent)?;
    for entry in fs::read_dir(&parent)? {
        let directory = entry?.path();
        if let Ok(release) = fs::read_to_string(directory.join("release"))
            && directory.join("vmlinuz").is_file()
        {
            return Ok(Kernel { directory, release });
        }
    }
    let package = kernel_package()?;
    let download = parent.join("download");
    let tree = deb::unpack(&package, "Debian's kernel for the test host", &download)?;

    let step = Step::begin("preparing the test host's kernel");
    let modules = [tree.join("lib/modules"), tree.join("usr/lib/modules")]
        .into_iter()
        .find(|path| path.is_dir())
        .context("the kernel package holds no modules")?;
    let release = fs::read_dir(&modules)?
        .next()
        .context("the kernel package holds no modules")??
        .file_name()
        .to_string_lossy()
        .into_owned();
    let directory = parent.join(&release);
    if directory.exists() {
        fs::remove_dir_all(&directory)?;
    }
    fs::create_dir_all(directory.join("lib"))?;
    fs::rename(&modules, directory.join("lib/modules"))?;
    process::run(
        process::tied("depmod")
            .arg("-b")
            .arg(&directory)
            .arg(&release)
            .env("PATH", path_with_sbin()),
    )?;
    let bzimage = directory.join("vmlinuz");
    fs::rename(
        tree.join("boot").join(format!("vmlinuz-{release}")),
        &bzimage,
    )
    .context("the kernel package holds no kernel")?;
    let image = fs::read(&bzimage)?;
    fs::write(directory.join("vmlinux"), unpack_bzimage(&image)?)?;
    fs::remove_dir_all(&download)?;
    fs::write(directory.join("release"), &release)?;
    step.done();
    Ok(Kernel { directory, release })
}

/// Returns the metapackage's dependency: `linux-image-VERSION-amd64`.
fn kernel_package() -> Result<String> {
    let depends = || {
        process::output(Command::new("apt-cache").args(["depends", "linux-image-amd64"]))
            .ok()
            .and_then(|text| {
                text.lines()
                    .filter_map(|line| line.trim().strip_prefix("Depends: "))
                    .find(|name| name.starts_with("linux-image-"))
                    .map(str::to_owned)
            })
    };
    if let Some(package) = depends() {
        return Ok(package);
    }
    // A fresh machine has no package lists yet.
    process::run(
        process::tied("apt-get")
            .args(["update", "-qq"])
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )
    .context("Debian's package lists cannot be fetched; run `apt-get update` as root")?;
    depends().context("Debian's archive has no linux-image-amd64 here")
}

/// Returns this program's PATH, with the programs for root.
pub(super) fn path_with_sbin() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
}

/// Returns the uncompressed ELF kernel within a bzImage (Linux boot protocol, `payload_offset`).
fn unpack_bzimage(image: &[u8]) -> Result<Vec<u8>> {
    let word = |at: usize| -> Result<usize> {
        let bytes: [u8; 4] = image
            .get(at..at + 4)
            .and_then(|bytes| bytes.try_into().ok())
            .context("the kernel is too short for a bzImage")?;
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    if word(0x202)? != 0x5372_6448 {
        bail!("the kernel is no bzImage (no HdrS mark)");
    }
    let setup_sectors = match image.get(0x1f1) {
        Some(0) | None => 4,
        Some(sectors) => usize::from(*sectors),
    };
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    let payload = image
        .get(start..start + word(0x24c)?)
        .context("the kernel's payload lies outside its file")?;
    // All formats but gzip are followed by the unpacked length, which their tools reject.
    let body = payload.get(..payload.len() - 4).unwrap_or_default();
    let (tool, body) = match payload {
        [0x7f, b'E', b'L', b'F', ..] => return Ok(payload.to_vec()),
        [0x1f, 0x8b, ..] => ("gzip", payload),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", body),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", body),
        [0x02, 0x21, ..] => ("lz4", body),
        _ => bail!("the kernel is compressed in a way that is not known here"),
    };
    let elf = filter(tool, body)?;
    if !elf.starts_with(b"\x7fELF") {
        bail!("the kernel's payload is no ELF file");
    }
    Ok(elf)
}

/// Pipes `input` through `TOOL -dc`.
fn filter(tool: &str, input: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new(tool)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("`{tool}` cannot be started"))?;
    let mut stdin = child.stdin.take();
    let mut stdout = child.stdout.take();
    let mut output = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        scope.spawn(move || stdin.take().map(|mut stdin| stdin.write_all(input)));
        if let Some(stdout) = stdout.as_mut() {
            stdout.read_to_end(&mut output)?;
        }
        Ok(())
    })?;
    if !child.wait()?.success() {
        bail!("`{tool}` cannot unpack the kernel");
    }
    Ok(output)
}

/// Returns the files of [`MODULES`] and of their dependencies, dependencies first, each once.
fn load_order(kernel: &Kernel) -> Result<Vec<(String, Vec<u8>)>> {
    let directory = kernel.directory.join("lib/modules").join(&kernel.release);
    let dependencies = fs::read_to_string(directory.join("modules.dep"))?;
    let builtin = fs::read_to_string(directory.join("modules.builtin"))?;
    let paths = order(&dependencies, &builtin, MODULES)?;
    paths
        .into_iter()
        .map(|path| {
            let file = directory.join(&path);
            let bytes =
                fs::read(&file).with_context(|| format!("{} cannot be read", file.display()))?;
            let name = path.rsplit('/').next().unwrap_or(&path);
            Ok(match name.strip_suffix(".xz") {
                Some(name) => (name.to_owned(), filter("xz", &bytes)?),
                None => (name.to_owned(), bytes),
            })
        })
        .collect()
}

/// Parses `modules.dep`, which has a line `module: dependency…` per module, the nearest dependency
/// first.
fn order(dependencies: &str, builtin: &str, wanted: &[&str]) -> Result<Vec<String>> {
    let is = |path: &str, name: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        let stem = file.split(".ko").next().unwrap_or(file);
        stem.replace('-', "_") == name.replace('-', "_")
    };
    let mut order: Vec<String> = Vec::new();
    for name in wanted {
        if builtin.lines().any(|path| is(path, name)) {
            continue;
        }
        let (module, needs) = dependencies
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(module, _)| is(module, name))
            .with_context(|| format!("the test host's kernel has no module {name}"))?;
        let chain = needs.split_whitespace().rev().chain([module]);
        for path in chain {
            if !order.iter().any(|known| known == path) {
                order.push(path.to_owned());
            }
        }
    }
    Ok(order)
}

fn write_initramfs(out: impl Write, busybox: &Path, modules: &[(String, Vec<u8>)]) -> Result<()> {
    let mut cpio = podvisor_cpio::Writer::new(out);
    for directory in [
        "bin", "dev", "host", "lower", "machine", "modules", "new", "proc", "sys", "upper",
    ] {
        cpio.directory(directory)?;
    }
    cpio.character_device("dev/console", 0o600, (5, 1))?;
    cpio.file("bin/busybox", 0o755, &fs::read(busybox)?)?;
    cpio.file("init", 0o755, INIT.as_bytes())?;
    cpio.file("host/stage2", 0o755, STAGE2.as_bytes())?;
    let mut list = String::new();
    for (name, bytes) in modules {
        cpio.file(&format!("modules/{name}"), 0o644, bytes)?;
        list.push_str(name);
        list.push('\n');
    }
    cpio.file("modules/order", 0o644, list.as_bytes())?;
    cpio.finish()?.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need_and_built_in_ones_are_left_out() {
        let dependencies = "k/fs/9p/9p.ko: k/net/9pnet.ko k/fs/netfs.ko\n\
                            k/net/9pnet.ko:\n\
                            k/net/9pnet_virtio.ko: k/net/9pnet.ko k/virtio.ko\n\
                            k/kvm-amd.ko.xz: k/kvm.ko.xz\n";
        let builtin = "kernel/fs/ext4/ext4.ko\n";
        assert_eq!(
            order(
                dependencies,
                builtin,
                &["9pnet_virtio", "9p", "ext4", "kvm_amd"]
            )
            .unwrap(),
            [
                "k/virtio.ko",
                "k/net/9pnet.ko",
                "k/net/9pnet_virtio.ko",
                "k/fs/netfs.ko",
                "k/fs/9p/9p.ko",
                "k/kvm.ko.xz",
                "k/kvm-amd.ko.xz"
            ]
        );
        let error = order(dependencies, builtin, &["nothing"]).unwrap_err();
        assert!(error.to_string().contains("no module nothing"));
    }

    #[test]
    fn a_bzimage_gives_its_kernel_and_other_files_are_refused() {
        let kernel = b"\x7fELF and more".to_vec();
        let mut image = vec![0_u8; 0x400];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        let length = u32::try_from(kernel.len()).unwrap();
        image[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
        image.extend([0; 16]);
        image.extend(&kernel);
        assert_eq!(unpack_bzimage(&image).unwrap(), kernel);

        image.truncate(0x410);
        assert!(unpack_bzimage(&image).is_err());
        assert!(unpack_bzimage(b"short").is_err());
    }
}
