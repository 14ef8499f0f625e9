package chaos

import (
	"fmt"
	"maps"
	"slices"
)

// environments are the values of the label env, which profiles select.
func environments() []string { return []string{"a", "b", "c"} }

// profile is the model of a ClusterProfile with the objects of one ConfigMap of the hub.
type profile struct {
	name     string
	selects  string // the value of the label env of its clusters
	edition  int
	isAbsent bool
}

// objects returns the texts of the ConfigMaps on a member by their names. From each edition to the next, one object
// stays, one changes, one is added and one is deleted. One profile also has adoptedObject.
func (p *profile) objects() map[string]string {
	all := map[string]string{
		p.name + "-kept":    "always the same",
		p.name + "-changed": fmt.Sprintf("edition %d", p.edition),
		fmt.Sprintf("%s-only-in-%d", p.name, p.edition): "comes and goes",
	}
	if p.name+"-adopted" == adoptedObject {
		all[adoptedObject] = adoptedText
	}
	return all
}

// model is the desired state of the fleet.
type model struct {
	profiles []*profile
	// chart is the edition of the chart on all members.
	chart int
	// env has the label of each registered member, by its name.
	env map[string]string
	// hadChart has the members that were registered when the fleet last settled, so that they had the chart.
	hadChart map[string]bool
	// chartContent has the first observed content of fixedChartObjects.
	chartContent map[string]string
}

func newModel() *model {
	m := &model{env: map[string]string{}, hadChart: map[string]bool{}, chartContent: map[string]string{}}
	for i, env := range environments() {
		m.profiles = append(m.profiles, &profile{name: fmt.Sprintf("content-%d", i), selects: env})
	}
	return m
}

// selected returns the profiles with content for a member.
func (m *model) selected(member string) []*profile {
	env, isRegistered := m.env[member]
	return slices.DeleteFunc(slices.Clone(m.profiles), func(p *profile) bool { return !isRegistered || p.isAbsent || p.selects != env })
}

// objects returns the ConfigMaps that a member must have.
func (m *model) objects(member string) map[string]string {
	all := map[string]string{}
	for _, p := range m.selected(member) {
		maps.Copy(all, p.objects())
	}
	return all
}

// matching returns the sorted names of the members that a profile selects.
func (m *model) matching(p *profile) []string {
	var all []string
	for member := range m.env {
		if slices.Contains(m.selected(member), p) {
			all = append(all, member)
		}
	}
	slices.Sort(all)
	return all
}

// registered returns the sorted names of the registered members, all of which have the chart.
func (m *model) registered() []string { return slices.Sorted(maps.Keys(m.env)) }

// recordSettled records that the members have the state of the model.
func (m *model) recordSettled() {
	clear(m.hadChart)
	for member := range m.env {
		m.hadChart[member] = true
	}
}

// summaries returns the names of the ClusterSummaries that the hub must have.
func (m *model) summaries() []string {
	var all []string
	for member := range m.env {
		all = append(all, m.summariesOf(member)...)
	}
	slices.Sort(all)
	return all
}

// summariesOf returns the names of the ClusterSummaries of a member.
func (m *model) summariesOf(member string) []string {
	if _, isRegistered := m.env[member]; !isRegistered {
		return nil
	}
	all := []string{summaryName(chartProfile, member)}
	for _, p := range m.selected(member) {
		all = append(all, summaryName(p.name, member))
	}
	return all
}

func summaryName(profile, member string) string { return profile + "-sveltos-" + member }

// deployed returns the lines of the ClusterConfigurations that the hub must have: see configurationLines.
func (m *model) deployed() []string {
	var all []string
	for member := range m.env {
		prefix := "sveltos--" + member
		all = append(all, prefix, fmt.Sprintf("%s %s Helm: release %[2]s/%[2]s 0.1.0", prefix, chartProfile))
		for _, p := range m.selected(member) {
			for name := range p.objects() {
				all = append(all, fmt.Sprintf("%s %s Resources: v1 ConfigMap %s/%s Remote", prefix, p.name, contentNamespace, name))
			}
		}
	}
	slices.Sort(all)
	return all
}
