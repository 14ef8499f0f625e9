// Command licenses prints the file NOTICE: the licenses of the modules that are compiled into a program, with their
// texts, and the licenses of the modules that only development uses. It fails for a module without a license that it
// knows to allow the distribution of binaries.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// minCoverage is the percentage of a file that must be the text of a known license.
const minCoverage = 75

// allowed returns whether binaries may be distributed under the Apache License together with code under a license, by
// SPDX identifier.
func allowed(id string) bool {
	return slices.Contains([]string{"Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "Zlib", "CC0-1.0", "Unlicense", "0BSD"}, id)
}

// module is a module of Go, as `go list` describes it.
type module struct {
	Path, Version, Dir string
	Main               bool
	Replace            *module
}

// isSame returns whether other is the same version of the same module.
func (m module) isSame(other module) bool { return m.Path == other.Path && m.Version == other.Version }

// license holds the licenses of a module, by SPDX identifier, and the texts to pass on.
type license struct {
	module module
	ids    []string
	texts  []string
}

// line returns the line of a module in a list.
func (l license) line() string {
	return fmt.Sprintf("%s %s (%s)\n", l.module.Path, l.module.Version, strings.Join(l.ids, ", "))
}

func main() {
	if err := run(context.Background(), os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, programs []string) error {
	modules, err := list(ctx, ".", programs...)
	if err != nil {
		return err
	}
	others, err := listDevelopment(ctx)
	if err != nil {
		return err
	}
	others = slices.DeleteFunc(others, func(m module) bool { return slices.ContainsFunc(modules, m.isSame) })
	contained, err := readAll(modules)
	if err != nil {
		return err
	}
	development, err := readAll(others)
	if err != nil {
		return err
	}
	return write(out, contained, development)
}

// listDevelopment returns the modules of all packages, with their tests and with the programs that tests run, sorted by
// path and version.
func listDevelopment(ctx context.Context) ([]module, error) {
	var all []module
	for _, from := range []struct {
		dir       string
		arguments []string
	}{
		{".", []string{"-test", "./..."}},
		{"localkube", []string{"-test", "./..."}},
		{"test/flux", []string{"tool"}},
	} {
		modules, err := list(ctx, from.dir, from.arguments...)
		if err != nil {
			return nil, err
		}
		all = append(all, modules...)
	}
	slices.SortFunc(all, func(a, b module) int { return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version)) })
	return slices.CompactFunc(all, module.isSame), nil
}

// list returns the modules of the packages that go list prints in dir for arguments, sorted by path.
func list(ctx context.Context, dir string, arguments ...string) ([]module, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-deps", "-json=Module"}, arguments...)...)
	cmd.Dir = dir
	// The same on every machine.
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	raw, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages in %s: %w", dir, err)
	}
	byPath := map[string]module{}
	for decoder := json.NewDecoder(bytes.NewReader(raw)); ; {
		var pkg struct{ Module *module }
		if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read the list of packages: %w", err)
		}
		m := pkg.Module
		if m == nil || m.Main {
			continue // the standard library, or ours
		}
		if m.Replace != nil {
			m = m.Replace
		}
		byPath[m.Path] = *m
	}
	var modules []module
	for _, m := range byPath {
		modules = append(modules, m)
	}
	slices.SortFunc(modules, func(a, b module) int { return cmp.Compare(a.Path, b.Path) })
	return modules, nil
}

// readAll reads the licenses of modules.
func readAll(modules []module) ([]license, error) {
	var licenses []license
	for _, m := range modules {
		l, err := read(m)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.Path, err)
		}
		licenses = append(licenses, l)
	}
	return licenses, nil
}

// read finds the license of a module, and what its authors want to be passed on.
func read(m module) (license, error) {
	l := license{module: m}
	entries, err := os.ReadDir(m.Dir)
	if err != nil {
		return l, err
	}
	for _, entry := range entries {
		isNotice := strings.HasPrefix(strings.ToUpper(entry.Name()), "NOTICE")
		if entry.IsDir() || !isNotice && !isLicenseFile(entry.Name()) {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(m.Dir, entry.Name()))
		if err != nil {
			return l, err
		}
		l.texts = append(l.texts, normalize(raw))
		if isNotice {
			continue
		}
		coverage := licensecheck.Scan(raw)
		for _, match := range coverage.Match {
			if !allowed(match.ID) {
				return l, fmt.Errorf("%s: license %s is not known to allow the distribution of binaries", entry.Name(), match.ID)
			}
			if !slices.Contains(l.ids, match.ID) {
				l.ids = append(l.ids, match.ID)
			}
		}
		if coverage.Percent < minCoverage {
			return l, fmt.Errorf("%s: only %.0f %% of it is the text of a known license", entry.Name(), coverage.Percent)
		}
	}
	if id := declared(m); len(l.ids) == 0 && id != "" {
		l.ids = append(l.ids, id)
	}
	if len(l.ids) == 0 {
		return l, errors.New("it has no license")
	}
	slices.Sort(l.ids)
	return l, nil
}

// declared returns the license that a module without a file for it names elsewhere, "" if none is known. It is only for
// modules that are not distributed: there is no text to pass on.
func declared(m module) string {
	if m.Path == "github.com/alibabacloud-go/cr-20160607" && m.Version == "v1.0.1" {
		return "Apache-2.0" // according to its README.md
	}
	return ""
}

func isLicenseFile(name string) bool {
	return regexp.MustCompile(`^(?i)(licen[cs]e|copying|unlicense)([-._].*)?$`).MatchString(name) && !strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, ".docs")
}

func normalize(text []byte) string {
	lines := strings.Split(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " \t\f")
	}
	return strings.Trim(strings.Join(lines, "\n"), "\n") + "\n"
}

// write prints a list of the contained modules and one of those that only development uses. Each text of the contained
// modules follows once, with the modules that have it.
func write(out io.Writer, contained, development []license) error {
	var text strings.Builder
	text.WriteString("Towline\nCopyright the Towline authors\n\nThis product is licensed under the Apache License, Version 2.0: see LICENSE.\n\n" +
		"It contains the following modules. Their licenses and notices follow the lists.\nGenerated: make generate\n\n")
	holders := map[string][]string{}
	var texts []string
	for _, l := range contained {
		text.WriteString(l.line())
		for _, t := range l.texts {
			if holders[t] == nil {
				texts = append(texts, t)
			}
			holders[t] = append(holders[t], l.module.Path)
		}
	}
	text.WriteString("\nIt does not contain the following modules or versions. Only its tests, localkube and its build use them, with these\n" +
		"licenses.\n\n")
	for _, l := range development {
		text.WriteString(l.line())
	}
	for _, t := range texts {
		fmt.Fprintf(&text, "\n%s\n%s\n\n%s", strings.Repeat("=", 80), strings.Join(holders[t], "\n"), t)
	}
	_, err := io.WriteString(out, text.String())
	return err
}
