//! The suite's images, made of Debian's packages: what the official ones do in the suite's specs.
//! They are pushed to a registry, whose data the host serves later.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::demo::image::{Image, Layer, layer};
use crate::demo::registry::Registry;
use crate::report::Step;
use crate::{deb, process};

/// To be raised when this file makes different images.
const RECIPE: &str = "1";

/// The file that says of what the images were made; it is written last.
pub(super) const KEY: &str = "key";

/// nginx, and the libraries that it needs.
const NGINX: [&str; 6] = [
    "nginx",
    "libc6",
    "libcrypt1",
    "libpcre2-8-0",
    "libssl3",
    "zlib1g",
];

const LIBRARIES: [&str; 8] = [
    "libc.so.",
    "ld-linux-x86-64.so.",
    "libcrypt.so.",
    "libpcre2-8.so.",
    "libcrypto.so.",
    "libssl.so.",
    "libm.so.",
    "libz.so.",
];

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/bin/false
www-data:x:33:33:www-data:/var/www:/bin/false
nobody:x:65534:65534:nobody:/:/bin/false
";
const GROUP: &str = "root:x:0:
daemon:x:1:
www-data:x:33:
nogroup:x:65534:
";

/// A set-uid program that says as whom it runs.
const EFFECTIVE_UID: &str = r#"
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("Effective uid: %d\n", (int)geteuid()); return 0; }
"#;

/// Ends at once when it is told to, as no shell that is process 1 does.
const PAUSE: &str = r#"
#include <signal.h>
#include <unistd.h>
static void end(int signal) { (void)signal; _exit(0); }
int main(void) { signal(SIGINT, end); signal(SIGTERM, end); for (;;) pause(); }
"#;

/// What busybox lacks and the suite calls.
const PGREP: &str = r#"#!/bin/sh
for process in /proc/[0-9]*; do
    read -r name < "$process/comm" && [ "$name" = "$1" ] && echo "${process#/proc/}"
done 2> /dev/null
"#;
const IPCS: &str = "#!/bin/sh\nexec cat /proc/sysvipc/shm\n";

const HTTPD: &str = "#!/bin/sh
echo 'httpd: serving /www' >&2
exec httpd -f -v -p 80 -h /www
";

/// Makes the images that are missing or outdated; returns the directory of a registry's `data`.
pub(super) fn ensure(results: &Path) -> Result<PathBuf> {
    let directory = results.join("images");
    let digest = process::sha256(Path::new("/bin/busybox"))?;
    let key = process::key(&[RECIPE, &digest])?;
    let is_current = || fs::read_to_string(directory.join(KEY)).is_ok_and(|made| made == key);
    if is_current() {
        return Ok(directory);
    }
    let _lock = process::Lock::take(results)?;
    if is_current() {
        return Ok(directory);
    }
    if directory.exists() {
        fs::remove_dir_all(&directory)?;
    }
    let build = directory.join("build");
    fs::create_dir_all(&build)?;
    let tree = deb::unpack_all(&NGINX, "nginx", &[], &directory.join("download"))?;
    let step = Step::begin("making critest's images");
    let registry = Registry::start(&directory)?;
    let maker = Maker {
        registry: &registry,
        base: layer(&build, "base", "busybox", base)?,
        build: &build,
    };
    maker.push_all(&tree)?;
    drop(registry);
    for temporary in ["build", "download"] {
        fs::remove_dir_all(directory.join(temporary))?;
    }
    fs::write(directory.join(KEY), key)?;
    step.done();
    Ok(directory)
}

#[derive(Debug)]
struct Maker<'a> {
    registry: &'a Registry,
    base: Layer,
    build: &'a Path,
}

impl Maker<'_> {
    fn push_all(&self, nginx: &Path) -> Result<()> {
        const E2E: &str = "e2e-test-images";
        const STAGING: &str = "k8s-staging-cri-tools";
        let shell = || json!({ "Cmd": ["sh"] });
        let daemon = || json!({ "Cmd": ["nginx", "-g", "daemon off;"], "StopSignal": "SIGQUIT" });
        self.push(&format!("{E2E}/busybox"), &["1.29-2"], Vec::new(), shell())?;
        for (name, tag, port) in [
            (format!("{E2E}/nginx"), "1.14-2", 80),
            (format!("{STAGING}/hostnet-nginx-amd64"), "latest", 12003),
        ] {
            let server = self.layer("nginx", |tree| web_server(tree, nginx, port))?;
            self.push(&name, &[tag], vec![server], daemon())?;
        }
        let httpd = self.layer("httpd", |tree| {
            fs::create_dir(tree.join("www"))?;
            fs::write(tree.join("www/index.html"), "<h1>It works!</h1>\n")?;
            fs::create_dir(tree.join("bin"))?;
            program(&tree.join("bin/httpd-foreground"), HTTPD.as_bytes(), 0o755)
        })?;
        let settings = json!({ "Cmd": ["httpd-foreground"] });
        self.push(
            &format!("{E2E}/httpd"),
            &["2.4.39-4"],
            vec![httpd],
            settings,
        )?;
        let set_uid = self.layer("nonewprivs", |tree| {
            compile(EFFECTIVE_UID, &tree.join("nnp"))?;
            set_mode(&tree.join("nnp"), 0o4755)
        })?;
        let settings = json!({ "Entrypoint": ["/nnp"] });
        self.push(
            &format!("{E2E}/nonewprivs"),
            &["1.3"],
            vec![set_uid],
            settings,
        )?;
        let pause = self.layer("pause", |tree| compile(PAUSE, &tree.join("pause")))?;
        let settings = json!({ "Entrypoint": ["/pause"], "User": "65535:65535" });
        self.push("pause", &["3.9", "3.10"], vec![pause], settings)?;
        self.push_users(STAGING)?;
        for (name, tags) in [
            ("latest", &["latest"][..]),
            ("tag", &["test"]),
            ("tag", &["all"]),
            ("1", &["latest"]),
            ("2", &["latest"]),
            ("3", &["latest"]),
            ("tags", &["1", "2", "3"]),
        ] {
            let first = tags.first().copied().unwrap_or_default();
            let mark = format!("{name}:{first}");
            // Without it, all would be one image.
            let layer = self.layer("mark", |tree| Ok(fs::write(tree.join("mark"), &mark)?))?;
            let name = format!("{STAGING}/test-image-{name}");
            self.push(&name, tags, vec![layer], shell())?;
        }
        Ok(())
    }

    /// Pushes the images that name a user, by number and by name, with and without a group.
    fn push_users(&self, repository: &str) -> Result<()> {
        for (name, user) in [
            ("user-uid", "1002"),
            ("user-username", "www-data"),
            ("user-uid-group", "1003:www-data"),
            ("user-username-group", "www-data:www-data"),
        ] {
            let name = format!("{repository}/test-image-{name}");
            let settings = json!({ "Cmd": ["sh"], "User": user });
            self.push(&name, &["latest"], Vec::new(), settings)?;
        }
        let users = self.layer("users", |tree| {
            fs::create_dir(tree.join("etc"))?;
            let user = "default-user:x:1000:1000::/home/default-user:/bin/sh\n";
            fs::write(tree.join("etc/passwd"), format!("{PASSWD}{user}"))?;
            let groups = "default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n";
            fs::write(tree.join("etc/group"), format!("{GROUP}{groups}"))?;
            Ok(())
        })?;
        let settings = json!({ "Cmd": ["sh"], "User": "1000" });
        let name = format!("{repository}/test-image-predefined-group");
        self.push(&name, &["latest"], vec![users], settings)
    }

    fn layer(&self, what: &'static str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<Layer> {
        layer(self.build, what, what, fill)
    }

    /// Pushes an image of the base and `layers`.
    fn push(
        &self,
        repository: &str,
        tags: &[&str],
        layers: Vec<Layer>,
        mut settings: Value,
    ) -> Result<()> {
        settings["Env"] = json!(["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
        let layers = std::iter::once(self.base.clone()).chain(layers).collect();
        let image = Image::write(self.build, layers, settings)?;
        for tag in tags {
            self.registry
                .push(&image, repository, tag)
                .with_context(|| format!("failed to push {repository}:{tag}"))?;
        }
        Ok(())
    }
}

fn base(tree: &Path) -> Result<()> {
    for directory in [
        "bin", "dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var",
    ] {
        fs::create_dir(tree.join(directory))?;
    }
    fs::create_dir_all(tree.join("var/run"))?;
    set_mode(&tree.join("tmp"), 0o1777)?;
    set_mode(&tree.join("root"), 0o700)?;
    fs::write(tree.join("etc/passwd"), PASSWD)?;
    fs::write(tree.join("etc/group"), GROUP)?;
    let busybox = tree.join("bin/busybox");
    fs::copy("/bin/busybox", &busybox).context("failed to copy /bin/busybox")?;
    set_mode(&busybox, 0o755)?;
    for name in process::output(Command::new(&busybox).arg("--list"))?.lines() {
        if name != "busybox" {
            // Hard links: a container that masks one program keeps the others.
            fs::hard_link(&busybox, tree.join("bin").join(name))?;
        }
    }
    for (name, script) in [("pgrep", PGREP), ("ipcs", IPCS)] {
        let path = tree.join("bin").join(name);
        if !path.exists() {
            program(&path, script.as_bytes(), 0o755)?;
        }
    }
    Ok(())
}

/// Copies nginx and its libraries out of the unpacked packages.
fn web_server(tree: &Path, packages: &Path, port: u16) -> Result<()> {
    for directory in [
        "usr/sbin",
        "usr/lib/x86_64-linux-gnu",
        "lib64",
        "etc/nginx",
        "var/log/nginx",
        "var/lib/nginx",
        "srv",
    ] {
        fs::create_dir_all(tree.join(directory))?;
    }
    let copy = |from: &Path, to: &Path| {
        fs::copy(from, to).with_context(|| format!("failed to copy {}", from.display()))
    };
    copy(
        &packages.join("usr/sbin/nginx"),
        &tree.join("usr/sbin/nginx"),
    )?;
    for directory in ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"] {
        let Ok(entries) = fs::read_dir(packages.join(directory)) else {
            continue;
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let text = name.to_string_lossy();
            let wanted = LIBRARIES.iter().any(|library| text.starts_with(library));
            if wanted {
                // Links become copies of what they name.
                copy(
                    &entry.path(),
                    &tree.join("usr/lib/x86_64-linux-gnu").join(&name),
                )?;
            }
        }
    }
    let loader = "ld-linux-x86-64.so.2";
    let target = format!("../usr/lib/x86_64-linux-gnu/{loader}");
    symlink(target, tree.join("lib64").join(loader))?;
    let page = "<html><head><title>Welcome to nginx!</title></head></html>\n";
    fs::write(tree.join("srv/index.html"), page)?;
    fs::write(tree.join("etc/nginx/nginx.conf"), nginx_conf(port))?;
    Ok(())
}

fn nginx_conf(port: u16) -> String {
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("    {name}_temp_path /tmp/{name};\n"))
        .collect();
    format!(
        "user www-data;
worker_processes 1;
pid /var/run/nginx.pid;
error_log /dev/stderr notice;
events {{ worker_connections 64; }}
http {{
    access_log /dev/stdout;
    default_type text/html;
{temporary}    server {{ listen {port}; root /srv; }}
}}
"
    )
}

/// Compiles a program of C, statically, into the file `program`.
fn compile(source: &str, program: &Path) -> Result<()> {
    let file = program.with_extension("c");
    fs::write(&file, source)?;
    process::run(
        process::tied("gcc")
            .args(["-Os", "-static", "-s", "-o"])
            .arg(program)
            .arg(&file),
    )?;
    fs::remove_file(file)?;
    Ok(())
}

fn program(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    fs::write(path, content)?;
    set_mode(path, mode)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("failed to set the mode of {}", path.display()))
}
