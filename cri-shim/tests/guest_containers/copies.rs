//! Files that are copied from and to containers.

use super::*;

#[test]
fn guest_long_copies_into_a_container_follow_links_and_delete_nothing() {
    let host = Host::with(|tree| {
        fs::create_dir(tree.join("evil")).unwrap();
        let readlink = tree.join("evil/readlink");
        fs::write(&readlink, "#!/bin/sh\nexec head -c 8000000 /dev/zero\n").unwrap();
        fs::set_permissions(&readlink, fs::Permissions::from_mode(0o755)).unwrap();
    });
    host.start(&["--name", "web"], "exec sleep 9999");
    let outside = tempfile::tempdir().unwrap();
    let at = |name: &str| outside.path().join(name).display().to_string();
    fs::write(at("file"), "hello\n").unwrap();
    fs::create_dir(at("conf")).unwrap();
    fs::write(at("conf/inner"), "inner\n").unwrap();
    let run = |script: &str| host.podvisor(&["exec", "web", "sh", "-c", script]);
    run(
        "mkdir -p /d/s /d/empty/file && cd /d && echo old >target && ln -s ../target s/link && \
         ln -s s/link twice && ln -s none dangling && ln -s loop loop && ln -s /dev/null null && \
         ln -s s dir && echo old >conf",
    )
    .printed("");

    // What a link leads to is written, and the link stays; it need not be there.
    host.podvisor(&["cp", &at("file"), "web:d/twice"])
        .printed("");
    host.podvisor(&["cp", &at("file"), "web:/d/dangling"])
        .printed("");
    host.podvisor(&["cp", &at("file"), "web:/d/dir"])
        .printed("");
    run("cd /d && cat target none s/file && \
         for link in twice s/link dangling dir; do readlink $link; done")
    .printed("hello\nhello\nhello\ns/link\n../target\nnone\ns\n");
    host.podvisor(&["cp", &at("file"), "web:/d/loop"])
        .refused(1, &["/d/loop", "40 links"]);
    host.podvisor(&["cp", &at("file"), "web:/d/null"])
        .refused(1, &["/d/null is a device"]);

    // Neither is a file replaced by a directory nor a directory by a file.
    for to in ["web:/d", "web:/d/conf", "web:/d/twice"] {
        host.podvisor(&["cp", &at("conf"), to])
            .refused(1, &["/d/", "is a file of the container"]);
    }
    for to in ["web:/d/empty", "web:/d/empty/"] {
        host.podvisor(&["cp", &at("file"), to])
            .refused(1, &["/d/empty/file is a directory of the container"]);
    }
    run("cd /d && cat conf target && ls empty").printed("old\nhello\nfile\n");
    host.podvisor(&["cp", &at("conf"), "web:/d/s"]).printed("");
    host.podvisor(&["cp", &at("conf"), "web:/d/s"]).printed("");
    run("cat /d/s/conf/inner").printed("inner\n");
    let slash = format!("{}/", at("file"));
    host.podvisor(&["cp", &slash, "web:/d/slash"])
        .refused(1, &["file/ is no directory", "leave out the slash"]);

    // A container that is not to be trusted may say anything of its links.
    let evil = ["--name", "evil", "-e", "PATH=/evil:/bin"];
    host.start(&evil, "ln -s x /link; exec sleep 9999");
    until("the link", || {
        let link = ["exec", "evil", "test", "-L", "/link"];
        host.podvisor(&link).code == Some(0)
    });
    host.podvisor(&["cp", &at("file"), "evil:/link"])
        .refused(1, &["cannot follow the link /link", "no path"]);
    host.podvisor(&["rm", "-f", "web", "evil"])
        .printed("web\nevil\n");
    host.leaves_nothing();
}

#[test]
fn guest_long_files_are_copied_whichever_tar_the_host_has() {
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "the host's\n").unwrap();
    // What the tar of a container that is not to be trusted sends.
    let mut hostile = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Link);
    header.set_size(0);
    header.set_mode(0o644);
    hostile.append_link(&mut header, "file", &victim).unwrap();
    let hostile = hostile.into_inner().unwrap();
    let host = Host::with(|tree| {
        fs::create_dir(tree.join("evil")).unwrap();
        fs::write(tree.join("evil/archive"), hostile).unwrap();
        let tar = tree.join("evil/tar");
        fs::write(&tar, "#!/bin/sh\nexec cat /evil/archive\n").unwrap();
        fs::set_permissions(&tar, fs::Permissions::from_mode(0o755)).unwrap();
    });
    host.start(&["--name", "web"], "exec sleep 9999");
    let evil = ["--name", "evil", "-e", "PATH=/evil:/bin"];
    host.start(&evil, "exec sleep 9999");
    let bin = outside.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink("/bin/busybox", bin.join("tar")).unwrap();
    let from = outside.path().join("from");
    fs::create_dir(&from).unwrap();
    fs::write(from.join("a [1]*"), "hello\n").unwrap();
    let at = |name: &str| outside.path().join(name).display().to_string();
    for (number, path) in [None, Some(bin.display().to_string())].iter().enumerate() {
        let copy = |from: &str, to: &str| {
            let mut copy = host.root.podvisor(&["cp", from, to]);
            if let Some(path) = path {
                copy.env("PATH", path);
            }
            Ran::new(copy.output().unwrap())
        };
        let [made, back] = ["made", "back"].map(|name| format!("{name}{number}"));
        copy(&at("from"), &format!("web:/{made}")).printed("");
        copy(&at("from/a [1]*"), &format!("web:/{made}/renamed")).printed("");
        for name in ["a [1]*", "renamed"] {
            let name = format!("/{made}/{name}");
            host.podvisor(&["exec", "web", "cat", &name])
                .printed("hello\n");
        }
        copy(&format!("web:/{made}"), &at(&back)).printed("");
        copy(&format!("web:/{made}/a [1]*"), &at("")).printed("");
        for name in [&*format!("{back}/a [1]*"), "a [1]*"] {
            assert_eq!(fs::read_to_string(at(name)).unwrap(), "hello\n");
        }
        fs::remove_file(at("a [1]*")).unwrap();
        let ran = copy("evil:/file", &at("file"));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(!Path::new(&at("file")).exists());
        assert_eq!(fs::metadata(&victim).unwrap().nlink(), 1);
    }
    host.podvisor(&["rm", "-f", "web", "evil"])
        .printed("web\nevil\n");
    host.leaves_nothing();
}
