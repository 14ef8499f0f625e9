package command

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpWidth is the maximum width of the help in columns.
const helpWidth = 100

// sectionAnnotation is the annotation of a flag with the title of its section in the help.
const sectionAnnotation = "section"

// Sections of the help that several commands have.
const (
	SectionCluster      = "Cluster flags:"
	SectionControlPlane = "Control plane flags:"
	SectionPush         = "Push mode flags:"
	SectionPull         = "Pull mode flags:"
	SectionAgent        = "Agent flags:"
	SectionHub          = "Hub flags:"
	SectionEndpoints    = "Endpoint flags:"
	// SectionOther lists the flags without a section.
	SectionOther = "Flags:"
	// SectionGlobal is the last one.
	SectionGlobal = "Global flags:"
)

// AddSection calls define, adds the flags that it defines to flags, and lists them in a section of the help. Sections,
// and the flags in a section, have the order of their definition.
func AddSection(flags *pflag.FlagSet, title string, define func(*pflag.FlagSet)) {
	section := pflag.NewFlagSet(title, pflag.ContinueOnError)
	section.SortFlags = false
	define(section)
	section.VisitAll(func(flag *pflag.Flag) { flag.Annotations = map[string][]string{sectionAnnotation: {title}} })
	flags.SortFlags = false
	flags.AddFlagSet(section)
}

// sectionOf returns the title of the section that lists a flag.
func sectionOf(flag *pflag.Flag) string {
	if titles := flag.Annotations[sectionAnnotation]; len(titles) > 0 {
		return titles[0]
	}
	if flag.Name == "help" { // cobra adds it
		return SectionGlobal
	}
	return SectionOther
}

// FlagsOfSection returns the flags of a section.
func FlagsOfSection(flags *pflag.FlagSet, title string) []*pflag.Flag {
	var found []*pflag.Flag
	flags.VisitAll(func(flag *pflag.Flag) {
		if sectionOf(flag) == title {
			found = append(found, flag)
		}
	})
	return found
}

// sectionTitles returns the titles of the sections that are not empty: in the order of definition, and the global one
// last.
func sectionTitles(flags *pflag.FlagSet) []string {
	var titles []string
	flags.VisitAll(func(flag *pflag.Flag) {
		if title := sectionOf(flag); title != SectionGlobal && !slices.Contains(titles, title) {
			titles = append(titles, title)
		}
	})
	return append(titles, SectionGlobal)
}

// printUsage prints the help of a command below its description. It prints the parts of cobra's usage, with flags in
// sections and wrapped to helpWidth. It is not a template, because cobra's template functions are global variables.
func printUsage(cmd *cobra.Command) error {
	var text strings.Builder
	text.WriteString("Usage:\n")
	if !cmd.HasAvailableSubCommands() || cmd.Flags().HasAvailableFlags() && len(sectionTitles(cmd.Flags())) > 1 {
		fmt.Fprintf(&text, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&text, "  %s [command]\n", cmd.CommandPath())
	}
	if cmd.HasExample() {
		// In examples the program has the name under which the user has called it.
		name := "  " + cmd.Root().CommandPath() + " "
		example := strings.NewReplacer("  sveltosctl ", name, "  karmadactl ", name).Replace(cmd.Example)
		fmt.Fprintf(&text, "\nExamples:\n%s\n", example)
	}
	for _, group := range cmd.Groups() {
		writeCommands(&text, cmd, group)
	}
	if len(cmd.Groups()) > 0 {
		writeCommands(&text, cmd, &cobra.Group{Title: "Additional Commands:"})
	} else {
		writeCommands(&text, cmd, &cobra.Group{Title: "Available Commands:"})
	}
	for _, title := range sectionTitles(cmd.Flags()) {
		section := pflag.NewFlagSet(title, pflag.ContinueOnError)
		section.SortFlags = false
		for _, flag := range FlagsOfSection(cmd.Flags(), title) {
			section.AddFlag(flag)
		}
		fmt.Fprintf(&text, "\n%s\n%s", title, section.FlagUsagesWrapped(helpWidth))
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&text, "\nUse \"%s [command] --help\" for more information about a command.\n", cmd.CommandPath())
	}
	_, err := io.WriteString(cmd.OutOrStderr(), text.String())
	return err
}

// writeCommands writes the subcommands of a group, if there are any.
func writeCommands(text *strings.Builder, cmd *cobra.Command, group *cobra.Group) {
	title := "\n" + group.Title + "\n"
	for _, sub := range cmd.Commands() {
		if sub.GroupID == group.ID && (sub.IsAvailableCommand() || sub.Name() == "help") {
			fmt.Fprintf(text, "%s  %-*s %s\n", title, sub.NamePadding(), sub.Name(), sub.Short)
			title = ""
		}
	}
}
