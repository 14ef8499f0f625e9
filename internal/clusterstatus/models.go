package clusterstatus

import (
	"cmp"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// DefaultResourceModels returns Karmada's resource models for a Cluster without spec.resourceModels. A node of grade 0
// has less than one CPU or less than 4 GiB of memory. Grade 8 begins at 128 CPUs and 1024 GiB.
func DefaultResourceModels() []clusterv1alpha1.ResourceModel {
	const gib = 1 << 30
	cpus := []int64{0, 1, 2, 4, 8, 16, 32, 64, 128, math.MaxInt64}
	memory := []int64{0, 4 * gib, 16 * gib, 32 * gib, 64 * gib, 128 * gib, 256 * gib, 512 * gib, 1024 * gib, math.MaxInt64}
	models := make([]clusterv1alpha1.ResourceModel, 0, len(cpus)-1)
	for grade := range len(cpus) - 1 {
		models = append(models, clusterv1alpha1.ResourceModel{Grade: uint(grade), Ranges: []clusterv1alpha1.ResourceModelRange{
			{Name: corev1.ResourceCPU, Min: *resource.NewQuantity(cpus[grade], resource.DecimalSI), Max: *resource.NewQuantity(cpus[grade+1], resource.DecimalSI)},
			{Name: corev1.ResourceMemory, Min: *resource.NewQuantity(memory[grade], resource.BinarySI), Max: *resource.NewQuantity(memory[grade+1], resource.BinarySI)},
		}})
	}
	return models
}

// grades is a list of resource models, sorted by grade.
type grades []clusterv1alpha1.ResourceModel

// sortGrades returns models sorted by grade, or the default models if there are none.
func sortGrades(models []clusterv1alpha1.ResourceModel) grades {
	if len(models) == 0 {
		return DefaultResourceModels()
	}
	sorted := slices.Clone(models)
	slices.SortStableFunc(sorted, func(a, b clusterv1alpha1.ResourceModel) int { return cmp.Compare(a.Grade, b.Grade) })
	return sorted
}

// indexOf returns the index of the grade of a node with these free amounts: the lowest of the grades of its resources.
// The grade of a resource is the highest one whose minimum it reaches. indexOf returns -1 if a resource reaches none.
func (g grades) indexOf(free amounts) int {
	lowest := len(g) - 1
	reached := map[corev1.ResourceName]int{}
	for i, model := range g {
		for _, limits := range model.Ranges {
			if _, ok := reached[limits.Name]; !ok {
				reached[limits.Name] = -1
			}
			quantity := free.quantity(limits.Name)
			if quantity.Cmp(limits.Min) >= 0 {
				reached[limits.Name] = i
			}
		}
	}
	for _, i := range reached {
		lowest = min(lowest, i)
	}
	return lowest
}
