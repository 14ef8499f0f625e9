package cli_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
)

// maxHelpWidth and maxShort are the maximum widths of a help and of the short description of a command, in columns.
const (
	maxHelpWidth = 100
	maxShort     = 80
)

// verbs returns the commands in a help, by the titles of their groups.
func verbs(help string) map[string]string {
	groups := map[string]string{}
	for _, group := range regexp.MustCompile(`(?m)^([A-Z].*):\n((?:  [a-z-]+ +[A-Z].*\n)+)`).FindAllStringSubmatch(help, -1) {
		var names []string
		for line := range strings.Lines(group[2]) {
			names = append(names, strings.Fields(line)[0])
		}
		groups[group[1]] = strings.Join(names, " ")
	}
	return groups
}

func TestHelpListsTheVerbsOfTheName(t *testing.T) {
	t.Parallel()
	karmadactl := map[string]string{
		"Cluster Registration Commands": "join register token unjoin unregister",
		"Additional Commands":           "completion help version",
	}
	for name, want := range map[string]map[string]string{
		"sveltosctl":      {"Available Commands": "completion deregister generate help register show version"},
		"karmadactl":      karmadactl,
		"kubectl-karmada": karmadactl,
		"towline": {
			"Cluster Registration Commands":               "deregister generate register",
			"Cluster Registration Commands as in Karmada": "join token unjoin unregister",
			"Inspection Commands":                         "show",
			"Components (run in containers)":              "agent hub karmada-agent",
			"Additional Commands":                         "completion demo help version",
		},
		"sveltosctl register": {"Available Commands": "cluster cluster-aks cluster-eks cluster-gke"},
		"towline register":    {"Available Commands": "cluster cluster-aks cluster-eks cluster-gke"},
		"karmadactl register": {},
	} {
		got := run(t, append(strings.Fields(name), "--help")...)
		if diff := cmp.Diff(want, verbs(got.out)); diff != "" || got.code != 0 {
			t.Errorf("%s --help: got code %d and verbs (-want +got):\n%s", name, got.code, diff)
		}
	}
}

func TestNamesRefuseTheVerbsOfOthers(t *testing.T) {
	t.Parallel()
	for name, verbs := range map[string]string{
		"sveltosctl": "join unjoin token unregister hub agent karmada-agent demo",
		"karmadactl": "deregister generate show hub agent karmada-agent demo",
	} {
		for _, verb := range strings.Fields(verbs) {
			got := run(t, name, verb, "--dry-run=false")
			if want := "error: unknown "; got.code != 1 || !strings.HasPrefix(got.err, want) {
				t.Errorf("%s %s: got %+v, want error output with %q", name, verb, got, want)
			}
		}
	}
	if got := run(t, "sveltosctl", "register", "127.0.0.1:1"); got.code != 1 || !strings.Contains(got.err, `unknown command "127.0.0.1:1"`) {
		t.Errorf("sveltosctl register <host:port>: got %+v", got)
	}
}

// commandsOf returns all commands of a name, including the commands that cobra adds.
func commandsOf(name string) []*cobra.Command {
	root := cli.New(name, command.Streams{})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	found := []*cobra.Command{root}
	for i := 0; i < len(found); i++ {
		found = append(found, found[i].Commands()...)
	}
	return found
}

func TestHelpOfEachCommand(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"towline", "sveltosctl", "karmadactl", "kubectl-karmada"} {
		for _, cmd := range commandsOf(name) {
			path := strings.ReplaceAll(cmd.CommandPath(), "kubectl karmada", "kubectl-karmada")
			if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") || strings.Contains(cmd.Short, "\n") || len(cmd.Short) > maxShort {
				t.Errorf("%s: the short description is %q, want one line of at most %d columns without a period", path, cmd.Short, maxShort)
			}
			if strings.Contains(cmd.Long, "\n\n") && !strings.Contains(path, " completion") && cmd.Name() != "help" {
				t.Errorf("%s: the long description has more than one paragraph", path)
			}
			if slices.ContainsFunc(flagsOf(cmd), isRequired) && !cmd.HasExample() {
				t.Errorf("%s: has required flags and no example", path)
			}
			for _, flag := range flagsOf(cmd) {
				checkFlag(t, path, flag)
			}
			got := run(t, append(strings.Fields(path), "--help")...)
			for _, other := range []string{"sveltosctl", "karmadactl"} {
				if name != other && strings.Contains(got.out, "\n  "+other+" ") {
					t.Errorf("%s --help: an example calls %s", path, other)
				}
			}
			for line := range strings.Lines(got.out) {
				if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > maxHelpWidth {
					t.Errorf("%s --help: this line is longer than %d columns: %s", path, maxHelpWidth, line)
				}
			}
			for _, flag := range flagsOf(cmd) {
				if strings.Count(got.out, "--"+flag.Name+" ") == 0 {
					t.Errorf("%s --help: no flag --%s", path, flag.Name)
				}
			}
		}
	}
}

func flagsOf(cmd *cobra.Command) []*pflag.Flag {
	var flags []*pflag.Flag
	cmd.Flags().VisitAll(func(flag *pflag.Flag) { flags = append(flags, flag) })
	return flags
}

func isRequired(flag *pflag.Flag) bool { return strings.Contains(flag.Usage, "(required)") }

// checkFlag checks the description of a flag. The help appends a default that is not the zero value.
func checkFlag(t *testing.T, path string, flag *pflag.Flag) {
	t.Helper()
	name, usage := pflag.UnquoteUsage(flag)
	hasDefault := !slices.Contains([]string{"", "false", "0", "0s", "[]"}, flag.DefValue)
	switch {
	case strings.TrimSpace(usage) == "":
		t.Errorf("%s --%s: no description", path, flag.Name)
	case strings.HasSuffix(usage, "."):
		t.Errorf("%s --%s: the description %q ends with a period", path, flag.Name, usage)
	case hasDefault && strings.Contains(usage, "default"), strings.Count(usage, "default") > 1:
		t.Errorf("%s --%s: the description %q has a default twice", path, flag.Name, usage)
	case name == "string" || name == "strings" || name == "stringToString":
		t.Errorf("%s --%s: the description %q names no value in backquotes", path, flag.Name, usage)
	}
}
